r"""Evaluate a model on Catch without training it.

python -m examples.catch.evaluate_catch data.val_data="['…/validation.parquet']" trainer.policy.model.path=… \
    generator.max_turns=5
"""

import sys

from examples.catch.main_catch import register_catch
from skyrl_train.entrypoints.evaluation import EvaluationExperiment
from skyrl_train.entrypoints.main_base import parse_cli, run_command


def main() -> None:
    """Run the command line, with overrides `key=value`."""
    register_catch()
    run_command(lambda: EvaluationExperiment(parse_cli(sys.argv[1:])).run())


if __name__ == "__main__":
    main()
