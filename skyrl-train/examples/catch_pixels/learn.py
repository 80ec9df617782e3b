"""Train a tiny vision-language model to play Catch from pixels: `make catch-pixels`.

    python -m examples.catch_pixels.learn --seed 42

Prepares the data and the model, trains the whole model with GRPO, and compares the result with optimal and random play.
With `--blank`, all boards are black, so the model can only guess. The exit status is 1 if the model did not learn.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.catch.catch_dataset import CatchDataset, write_rows
from examples.catch.learn import learn, parser
from examples.catch.recipe import CatchRun
from examples.catch_pixels.model import make_model
from skyrl_gym.envs import register
from skyrl_train.entrypoints.main_base import run_command

REQUIRED_SHARE = 0.85
"""Fraction of the optimal player's catch rate."""


@dataclass(frozen=True)
class PixelsRun(CatchRun):
    """A run of the recipe of Catch in which the model sees images."""

    label: str = "pixels"

    @property
    def data_dir(self) -> Path:
        return self.output_dir / "catch" / "data" / "pixels"

    @property
    def model_dir(self) -> Path:
        return self.output_dir / "catch" / "models" / f"tiny-idefics3-seed{self.seed}"

    @property
    def command(self) -> str:
        return f"make catch-pixels SEED={self.seed}" + " ARGS=--blank" * (self.label == "blank")

    @property
    def required_share(self) -> float:
        return REQUIRED_SHARE

    def write_data(self) -> None:
        dataset = CatchDataset()
        for name, rows in (("train", dataset.train_rows()), ("validation", dataset.validation_rows())):
            write_rows([row | {"env_class": "catch_pixels"} for row in rows], self.data_dir / f"{name}.parquet")

    def write_model(self) -> None:
        loss = make_model(CatchDataset().train_rows(), self.model_dir, self.seed)
        print(f"Wrote a tiny Idefics 3 to {self.model_dir} (loss: {loss:.3f} nats per token)")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--blank", action="store_true", help="show black boards")
    options.add_argument("overrides", nargs="*", help="configuration overrides key=value")
    args = options.parse_args(argv)
    register(id="catch_pixels", entry_point="examples.catch_pixels.env:CatchPixelsEnv")
    settings = ["trainer.policy.model.freeze_vision=false"]
    if args.blank:
        settings.append("environment.skyrl_gym.catch_pixels.blank=true")
    output_dir, label = args.output_dir.expanduser().resolve(), "blank" if args.blank else "pixels"
    run = PixelsRun(output_dir, "shaped", args.seed, args.steps, label, (*settings, *args.overrides))
    results: list[bool] = []
    run_command(lambda: results.append(learn(run)))
    sys.exit(0 if results[0] else 1)


if __name__ == "__main__":
    main()
