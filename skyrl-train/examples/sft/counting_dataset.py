"""Demonstrations of counting: `python -m examples.sft.counting_dataset FOLDER` writes train.jsonl and val.jsonl."""

import argparse
import random
from pathlib import Path

from skyrl_train.dataset.files import write_jsonl


def demonstrations() -> list[dict[str, str]]:
    """Return a row for each pair of digits."""
    return [
        {
            "prompt": f"Count from {first} to {last}.",
            "response": " ".join(str(n) for n in range(first, last + 1)) if first <= last else "I cannot count down.",
        }
        for first in range(10)
        for last in range(10)
    ]


def main(argv: list[str] | None = None) -> None:
    """Write 80 rows to train on and 20 to validate on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    rows = demonstrations()
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", rows[:80])
    write_jsonl(folder / "val.jsonl", rows[80:])
    print(f"Wrote 80 rows to {folder / 'train.jsonl'} and 20 to {folder / 'val.jsonl'}")


if __name__ == "__main__":
    main()
