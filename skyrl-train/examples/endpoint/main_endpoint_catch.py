"""Train a tiny model on Catch through an agent that only knows OpenAI's client.

    python -m examples.endpoint.main_endpoint_catch --seed 42

Makes the data and the model of the Catch example, trains through the endpoint, and says how much better the model
plays. The exit status is 1 if it did not learn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from examples.catch.learn import parser
from examples.catch.main_catch import register_catch
from examples.catch.recipe import THIS_RUN, TINY_MODEL, CatchRun
from examples.endpoint.agent import play_catch
from skyrl_train.config import SkyRLConfig, parse_cli
from skyrl_train.entrypoints.main_base import BasePPOExp, run_command
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.endpoint import AgentGenerator
from skyrl_train.inference_engines.base import InferenceEngine

N_STEPS = 40
REQUIRED_RATE = 0.75  # random play catches 14%

SMALLER = (
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=4",  # four updates a step
    "trainer.update_epochs_per_batch=2",  # twice over: updates are cheaper than games here
    "generator.n_samples_per_prompt=8",
    "trainer.policy.optimizer_config.num_warmup_steps=5",
)
"""A request takes some milliseconds, most of them in the client: fewer games a step than in the Catch example."""


class EndpointExp(BasePPOExp):
    """A training run whose rollouts are an agent's doing."""

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> GeneratorInterface:
        """See `BasePPOExp.get_generator`."""
        return AgentGenerator(play_catch, cfg.generator, inference_engine_client, tokenizer)


class EndpointRun(CatchRun):
    """The Catch recipe with fewer games, played through the endpoint."""

    def train(self) -> None:
        """See `CatchRun.train`."""
        this_run = [
            f"data.train_data=['{self.data_dir / 'train.parquet'}']",
            f"data.val_data=['{self.data_dir / 'validation.parquet'}']",
            f"trainer.policy.model.path='{self.model_dir}'",
            f"trainer.output_dir='{self.output_dir}'",
            f"trainer.run_name={self.name}",
            f"trainer.max_training_steps={self.n_steps}",
            f"trainer.eval_interval={self.n_steps}",
            f"trainer.seed={self.seed}",
        ]
        EndpointExp(parse_cli([*TINY_MODEL, *THIS_RUN, *SMALLER, *this_run, *self.overrides])).run()


def learn(run: EndpointRun) -> bool:
    """Prepare, train, and say how well the model plays; whether that is well enough."""
    started = time.monotonic()
    run.prepare()
    run.train()
    before, after = run.catch_rates()
    print(f"\nCatch rate on the validation set ({run.n_steps} steps, {time.monotonic() - started:.0f} s)\n")
    for label, rate in (("random play", run.baselines().chance), ("before training", before), ("after", after)):
        print(f"  {label:<16} {rate:6.1%}   {'█' * round(40 * rate)}")
    has_learned = after >= REQUIRED_RATE
    verdict = "It has learned" if has_learned else "It has NOT learned"
    print(f"\n{verdict} ({REQUIRED_RATE:.0%} required). The run is in {run.folder.path}")
    return has_learned


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; what stands behind `--` are overrides of the configuration."""
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(steps=N_STEPS)
    options.add_argument("overrides", nargs="*", help="key=value of the configuration")
    args = options.parse_args(argv)
    register_catch()
    output_dir = args.output_dir.expanduser().resolve()
    run = EndpointRun(output_dir, "shaped", args.seed, args.steps, label="endpoint", overrides=tuple(args.overrides))
    results: list[bool] = []
    run_command(lambda: results.append(learn(run)))
    sys.exit(0 if results[0] else 1)


if __name__ == "__main__":
    main()
