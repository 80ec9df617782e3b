"""Train a tiny model on Catch through an agent that only uses OpenAI's client.

    PYTHONPATH=../skyrl-agent/examples python -m endpoint_catch.learn --seed 42

Prepares the data and model of the Catch example, trains through the endpoint, and prints how much better the model
plays. Exit status 1 means that it did not learn.
"""

import sys
import time
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from endpoint_catch.agent import play_catch
from examples.catch.learn import parser
from examples.catch.main_catch import register_catch
from examples.catch.recipe import CatchRun
from skyrl_agent.agent_generator import AgentGenerator
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import run_command
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.inference_engines.base import InferenceEngine

N_STEPS = 40
REQUIRED_RATE = 0.75  # random play catches 14%

SMALLER = (
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=4",  # four updates per step
    "trainer.update_epochs_per_batch=2",  # two passes, because updates are cheaper than games here
    "generator.n_samples_per_prompt=8",
    "trainer.policy.optimizer_config.num_warmup_steps=5",
)
"""A request takes a few milliseconds, mostly in the client, so steps have fewer games than in the Catch example."""


class EndpointExp(RLExperiment):
    """A training run with an agent as generator."""

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> RolloutGenerator:
        """Return the generator that runs the agent."""
        return AgentGenerator(play_catch, cfg.generator, inference_engine_client, tokenizer)


def learn(run: CatchRun) -> bool:
    """Prepare and train, print the catch rates, and return True if the required rate is reached."""
    started = time.monotonic()
    run.prepare()
    run.train()
    before, after = run.catch_rates()
    print(f"\nCatch rate on the validation set ({run.n_steps} steps, {time.monotonic() - started:.0f} s)\n")
    for label, rate in (("random play", run.baselines().chance), ("before training", before), ("after", after)):
        print(f"  {label:<16} {rate:6.1%}   {'█' * round(40 * rate)}")
    has_learned = after >= REQUIRED_RATE
    verdict = "Passed" if has_learned else "FAILED"
    print(f"\n{verdict}: catch rate {after:.1%} (required {REQUIRED_RATE:.0%}). The run is in {run.folder.path}")
    return has_learned


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line, with overrides after `--`."""
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(steps=N_STEPS)
    options.add_argument("overrides", nargs="*", help="configuration overrides key=value")
    args = options.parse_args(argv)
    register_catch()
    output_dir = args.output_dir.expanduser().resolve()
    overrides = (*SMALLER, f"trainer.eval_interval={args.steps}", *args.overrides)
    run = CatchRun(output_dir, "shaped", args.seed, args.steps, "endpoint", overrides, EndpointExp)
    results: list[bool] = []
    run_command(lambda: results.append(learn(run)))
    sys.exit(0 if results[0] else 1)


if __name__ == "__main__":
    main()
