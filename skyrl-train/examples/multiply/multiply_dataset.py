r"""Write the multiply dataset: products of two random numbers, the task of SkyRL's tutorial.

    python -m examples.multiply.multiply_dataset --output_dir ~/data/multiply --num_digits 2

Both factors have `num_digits` digits. No two rows have the same factors in any order, so the validation products do not
occur in training. The answer is expected in ``\boxed{…}``. Factors are drawn with `--seed`, unless `--source` is a file
of custom factors in the columns `a` and `b`.
"""

import random
from collections.abc import Sequence

import pyarrow as pa

from examples.prepare import Preparation, command_line, field, prepare, row_schema
from skyrl_gym.data.files import Row
from skyrl_train.errors import DataError

SCHEMA = row_schema({"num_digits": pa.int64()})
N_PRODUCTS = 2000
MAX_DIGITS = 1000  # Python formats at most 4300 digits

SYSTEM_PROMPT = (
    "You multiply numbers. Work the product out step by step, and put the final answer, as digits only, in \\boxed{}."
)


def dataset_row(raw: Row, split: str, index: int) -> Row:
    """Return a product's dataset row."""
    a, b = field(raw, "a", int), field(raw, "b", int)
    return {
        "data_source": "synthetic_multiply",
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"What is {a} * {b}?"}],
        "env_class": "multiply",
        "reward_spec": {"method": "rule", "ground_truth": str(a * b)},
        "extra_info": {"split": split, "num_digits": len(str(a))},
    }


def products(num_digits: int, n_products: int, seed: int) -> list[Row]:
    """Return up to `n_products` distinct pairs of factors in random order."""
    low, high = 10 ** (num_digits - 1), 10**num_digits
    n_pairs = (high - low) * (high - low + 1) // 2
    rng = random.Random(seed)
    pairs: dict[tuple[int, int], Row] = {}
    while len(pairs) < min(n_products, n_pairs):
        a, b = rng.randrange(low, high), rng.randrange(low, high)
        pairs.setdefault((min(a, b), max(a, b)), {"a": a, "b": b})
    return list(pairs.values())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line(__doc__, "multiply", default_source="sample")
    parser.add_argument("--num_digits", type=int, default=2, help="digits of both factors")
    args = parser.parse_args(argv)

    def sample(seed: int) -> list[Row]:
        if not 1 <= args.num_digits <= MAX_DIGITS:
            raise DataError(f"--num_digits={args.num_digits} must be from 1 to {MAX_DIGITS}")
        return products(args.num_digits, N_PRODUCTS, seed)

    prepare(Preparation(SCHEMA, dataset_row, sample), parser, args)


if __name__ == "__main__":
    main()
