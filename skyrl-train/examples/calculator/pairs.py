"""Preference pairs from episodes: a first reply that led to the right answer, and one to the same problem that did not.

    python -m examples.calculator.pairs sampled.parquet outputs/…/evals/calculator.jsonl pairs.jsonl

The arguments are the problems, their episodes as `skyrl generate` wrote them, with several samples of each problem, and
the file to write.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.calculator.env import CalculatorEnv
from skyrl_train.dataset.files import read_rows, write_jsonl


def pairs(rows: Sequence[dict[str, Any]], episodes: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a pair for each problem that some samples solved and others did not.

    Args:
        rows: the problems, of a dataset.
        episodes: samples of the first problems. The uid `17_3` belongs to sample 3 of problem 17.
    """
    replies: dict[int, dict[bool, str]] = {}
    for episode in episodes:
        if episode["error"] is not None:
            continue
        first_reply = episode["output_response"].partition("<|im_end|>")[0]
        replies.setdefault(int(episode["uid"].partition("_")[0]), {})[episode["is_success"]] = first_reply
    for index, by_success in sorted(replies.items()):
        if len(by_success) == 2 and by_success[True] != by_success[False]:
            prompt, _ = CalculatorEnv(None, rows[index]).init(rows[index]["prompt"])
            yield {"prompt": prompt, "chosen": by_success[True], "rejected": by_success[False]}


def main() -> None:
    """Run the command."""
    problems, episodes, output = map(Path, sys.argv[1:])
    with episodes.open(encoding="utf-8") as lines:
        found = list(pairs(read_rows(str(problems)), map(json.loads, lines)))
    write_jsonl(output, found)
    print(f"{output}: {len(found)} pairs")


if __name__ == "__main__":
    main()
