"""Convert generated or reasoned files to train.parquet and val.parquet, for SFT (`--format sft`) or for RL (`rl`).

    python -m data_processing.convert_to_parquet --input data_processing/lgc-v2/generated/*.jsonl --format sft

SFT rows have `prompt` and `response` as text. RL rows have `prompt` as messages, `reward_model` and `extra_info`.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_processing.arguments import not_negative, ratio
from data_processing.jobs import Record, ToolError, read_records, run_tool

RESPONSE_FIELDS = ("response", "answer", "completion", "output", "assistant", "label")
SOURCE_FIELDS = ("data_source", "task_type")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, help="JSON-lines files")
    add("--format", choices=("rl", "sft"), default="rl")
    add("--out-dir", type=Path, default=Path("train/parquet"), help="folder of both files (default: %(default)s)")
    add("--prompt-field", default="prompt")
    add("--response-field", help=f"by default, the first of {', '.join(RESPONSE_FIELDS)} that a record has")
    add("--data-source-field", help=f"by default, the first of {', '.join(SOURCE_FIELDS)} that a record has")
    add("--val-ratio", type=ratio, default=0.2, help="share of validation rows (default: %(default)s)")
    add("--shuffle", action="store_true", help="shuffle before splitting")
    add("--seed", type=not_negative, default=42, help="seed of --shuffle (default: %(default)s)")
    args = parser.parse_args(argv)
    return run_tool(lambda: convert(args))


def convert(args: argparse.Namespace) -> int:
    """Write both files. Records with the same prompt go to the same file."""
    rows = [
        _create_row(record, f"record {number} of {path}", args)
        for path in args.input
        for number, record in enumerate(read_records(path), start=1)
    ]
    groups: dict[str, list[Record]] = {}
    for row in rows:
        groups.setdefault(str(row["prompt"]), []).append(row)
    order = list(groups.values())
    if args.shuffle:
        random.Random(args.seed).shuffle(order)
    n_val = round(len(order) * args.val_ratio)
    if len(order) - n_val < 1:
        raise ToolError(
            f"{len(order)} distinct prompts leave no training row at --val-ratio {args.val_ratio}; lower it"
        )
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", order[: len(order) - n_val]), ("val", order[len(order) - n_val :])):
        split = [row for group in part for row in group]
        path = args.out_dir / f"{name}.parquet"
        if not split:
            path.unlink(missing_ok=True)  # an older file would belong to a different dataset
            print(f"{path}: no rows at --val-ratio {args.val_ratio}, not written")
            continue
        partial = path.with_suffix(".partial")
        pq.write_table(pa.Table.from_pylist(split), partial)
        partial.replace(path)
        print(f"{path}: {len(split)} rows")
    return 0


def _create_row(record: Record, location: str, args: argparse.Namespace) -> Record:
    prompt = _read_field(record, (args.prompt_field,), location, "--prompt-field")
    source = next((record[name] for name in SOURCE_FIELDS if name in record), "unknown")
    if args.data_source_field:
        source = _read_field(record, (args.data_source_field,), location, "--data-source-field")
    extra = record.get("extra_info") or {}
    extra = json.dumps(extra if isinstance(extra, dict) else {"extra_info": extra}, ensure_ascii=False)
    row = {"data_source": str(source), "extra_info": extra}
    if args.format == "sft":
        names = (args.response_field,) if args.response_field else RESPONSE_FIELDS
        return {**row, "prompt": prompt, "response": _read_field(record, names, location, "--response-field")}
    truth = next((record[name] for name in ("ground_truth", "raw_answer", "answer") if name in record), "")
    return {
        **row,
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
    }


def _read_field(record: Record, names: Sequence[str], location: str, flag: str) -> str:
    value = next((record[name] for name in names if record.get(name) is not None), None)
    if not isinstance(value, str) or not value.strip():
        raise ToolError(
            f"{location} has no text in {' or '.join(names)}, but in {', '.join(record)}; set {flag} to one of them"
        )
    return value


if __name__ == "__main__":
    sys.exit(main())
