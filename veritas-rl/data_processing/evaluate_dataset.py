"""Verify the answers of a dataset file: `python -m data_processing.evaluate_dataset --input tasks.jsonl`.

The exit status is 1 if an answer is wrong or cannot be verified.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from data_processing.arguments import family_folder
from data_processing.jobs import Record, read_records, run_tool
from skyrl_gym.runtime.text import describe_error
from skyrl_gym.tasks import compute_score


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="generated or reasoned file")
    parser.add_argument(
        "--output", type=Path, help="summary; by default, the same name as .json in the folder results/"
    )
    parser.add_argument("--verbose", action="store_true", help="print each wrong answer")
    args = parser.parse_args(argv)
    return run_tool(lambda: verify(args))


def verify(args: argparse.Namespace) -> int:
    """Verify the answers, write the summary and print it."""
    records = read_records(args.input)
    results = [_verify(record) for record in tqdm(records, desc="verify", unit="record", disable=None)]
    by_type: dict[str, list[float]] = defaultdict(list)
    for result in results:
        by_type[result["task_type"]].append(result["score"] or 0.0)
    n_correct = sum((result["score"] or 0.0) > 0 for result in results)
    n_errors = sum(result["error"] is not None for result in results)
    summary = {
        "input_file": str(args.input),
        "total_samples": len(results),
        "correct": n_correct,
        "incorrect": len(results) - n_correct - n_errors,
        "error_count": n_errors,
        "accuracy": n_correct / len(results) if results else None,
        "task_type_accuracy": {name: sum(s > 0 for s in scores) / len(scores) for name, scores in by_type.items()},
        "results": results,
    }
    output = args.output or family_folder(args.input) / "results" / f"{args.input.stem}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for result in results:
        if args.verbose and not result["score"]:
            print(f"task {result['task_id']}: {result['error'] or 'wrong'}")
    print(f"{args.input}: {n_correct} of {len(results)} right, {n_errors} errors; {output}")
    return int(n_correct < len(results) or not results)


def _verify(record: Record) -> Record:
    score, error = None, None
    try:
        score = compute_score(None, str(record["answer"]), None, record["extra_info"])
    except Exception as problem:  # noqa: BLE001, the boundary of one record
        error = describe_error(problem)
    return {"task_id": record.get("task_id"), "task_type": str(record.get("task_type")), "score": score, "error": error}


if __name__ == "__main__":
    sys.exit(main())
