"""Preference pairs: an answer is better than a refusal.

`python -m examples.dpo.counting_pairs FOLDER` writes train.jsonl and val.jsonl.
"""

import argparse
import random
from pathlib import Path

from examples.sft.counting_dataset import demonstrations
from skyrl_train.dataset.files import write_jsonl

REFUSALS = ("I would rather not count.", "Counting is not for me.", "Please ask somebody else.", "No.")


def pairs() -> list[dict[str, str]]:
    """Return a row for each pair of digits, shuffled: the count, and a refusal to count."""
    rng = random.Random(0)
    rows = [
        {"prompt": row["prompt"], "chosen": row["response"], "rejected": rng.choice(REFUSALS)}
        for row in demonstrations()
    ]
    rng.shuffle(rows)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Write 80 pairs to train on and 20 to validate on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = pairs()
    write_jsonl(folder / "train.jsonl", rows[:80])
    write_jsonl(folder / "val.jsonl", rows[80:])
    print(f"Wrote 80 pairs to {folder / 'train.jsonl'} and 20 to {folder / 'val.jsonl'}")


if __name__ == "__main__":
    main()
