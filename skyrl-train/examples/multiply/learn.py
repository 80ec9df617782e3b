r"""A tiny model learns the multiplication table up to six times six.

    python -m examples.multiply.learn --seed 42

At the start, it knows only the format: it writes ``\boxed{…}`` around some product of the table, whatever the question.
The table's 36 questions are used for both training and validation: the example shows that rewards teach the table, and
does not test unseen numbers. Exit status 1 means that the model did not learn.
"""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from examples.learning import Recipe, main
from skyrl_gym.envs.base_text_env import ConversationType

FACTORS = range(1, 7)
PRODUCTS = sorted({a * b for a in FACTORS for b in FACTORS})


def question(a: int, b: int) -> dict[str, Any]:
    """Return the dataset row of a product."""
    return {
        "data_source": "multiply",
        "prompt": [{"role": "user", "content": f"{a} * {b}"}],
        "env_class": "multiply",
        "reward_spec": {"method": "rule", "ground_truth": str(a * b)},
        "extra_info": {"a": a, "b": b},
    }


def write_data(folder: Path) -> None:
    """Write the whole table as training and validation data."""
    folder.mkdir(parents=True, exist_ok=True)
    table = [question(a, b) for a in FACTORS for b in FACTORS]
    for name, rows in (("train", table), ("validation", table)):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def attempt(row: dict[str, Any], rng: random.Random) -> ConversationType:
    """Return the question with an arbitrary product as its answer."""
    return [*row["prompt"], {"role": "assistant", "content": f"\\boxed{{{rng.choice(PRODUCTS)}}}"}]


RECIPE = Recipe(
    name="multiply",
    write_data=write_data,
    attempt=attempt,
    overrides=(
        "trainer.train_batch_size=36",
        "trainer.policy_mini_batch_size=9",
        "generator.n_samples_per_prompt=32",
        "trainer.algorithm.advantage_estimator=maxrl",  # gives rare correct answers the most weight
        "trainer.algorithm.kl_loss_coef=0.05",
        "generator.sampling_params.max_generate_length=6",
    ),
    metric="eval/all/avg_score",
    required=0.95,
    chance=1 / len(PRODUCTS),
    n_steps=80,
    context_length=64,
)

if __name__ == "__main__":
    main(RECIPE, __doc__ or "")
