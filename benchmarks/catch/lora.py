"""Train the tiny model on Catch with all weights, and with a low-rank adapter: `make bench-lora`.

Both runs start from the same weights. The script writes `lora.md` and `lora.png` next to this file.
"""

import argparse
from pathlib import Path

from harness import conditions
from table import measure_all

from examples.catch.main_catch import register_catch
from examples.catch.recipe import CatchRun
from skyrl_train.entrypoints.main_base import run_command

ARMS = {
    "all weights": (),
    "adapter of rank 8": ("trainer.policy.model.lora.rank=8", "trainer.policy.optimizer_config.lr=3e-3"),
}


def main() -> None:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--output_dir", type=Path, default=Path("outputs/bench-lora"))
    args = options.parse_args()
    register_catch()
    output_dir = args.output_dir.resolve()
    runs = {
        name: CatchRun(output_dir, "shaped", args.seed, label=name.replace(" ", "-"), overrides=overrides)
        for name, overrides in ARMS.items()
    }
    text = (
        f"`make bench-lora`, {conditions()}. {runs['all weights'].n_steps} steps with seed {args.seed} from the same "
        "weights. The learning rate is 1e-3 for all weights and 3e-3 for an adapter on all linear layers."
    )
    page = Path(__file__).with_name("lora.md")
    run_command(lambda: measure_all(runs, page, "Catch with an adapter", text, "trained"))


if __name__ == "__main__":
    main()
