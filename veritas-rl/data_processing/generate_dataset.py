"""Generate tasks with answers: `python -m data_processing.generate_dataset --env lgc-v2 --num-samples 100`.

Tasks come from the training split, or from the validation split with `--split validation`. Rerun the command to add
missing tasks. Each line is a JSON object with the task's id, type and prompt, an `answer` in the prompt's format, and
the bare `raw_answer`.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from data_processing.arguments import FOLDER, add_family, not_negative, positive
from data_processing.jobs import Record, run_tool, work
from skyrl_gym.tasks import DynamicEnvDataset, task_family, task_row


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_family(parser)
    add = parser.add_argument
    add("--num-samples", type=positive, required=True, help="number of tasks")
    add("--task-types", nargs="+", help="task types of lgc-v2; all by default")
    add("--start", type=not_negative, default=0, help="first task of the split (default: %(default)s)")
    add("--split", choices=("train", "validation"), default="train")
    add("--concurrency", type=positive, default=4, help="tasks at a time (default: %(default)s)")
    add("--output", type=Path, help="file to write; by default data_processing/<env>/generated/<split>-<tasks>.jsonl")
    args = parser.parse_args(argv)
    return run_tool(lambda: generate(args))


def generate(args: argparse.Namespace) -> int:
    """Generate the tasks."""
    adapter_config = args.adapter_config | ({"task_types": args.task_types} if args.task_types else {})
    family = task_family(args.env, adapter_config)
    end = args.start + args.num_samples
    size = {"num_train_tasks": end, "num_val_tasks": end} if family.task_ids is None else {}
    options = {"env": family.env, "adapter_config": adapter_config, **size}
    dataset = DynamicEnvDataset(config={"custom_cls": {"config": options}}, split=args.split)
    if end > len(dataset):
        raise ValueError(
            f"--start {args.start} and --num-samples {args.num_samples} go beyond the {len(dataset)} {args.split} "
            f"tasks of env={family.env} with these options; lower them"
        )

    def record(request: Record) -> Record:
        task = family.generate(dataset.task_id(request["index"]))
        answer = family.solve(task)
        return {
            "key": request["key"],
            "task_id": task.task_id,
            "task_type": task.task_type,
            "prompt": task.prompt,
            "answer": answer,
            "raw_answer": task.ground_truth or answer,
            "extra_info": task_row(family, task, args.split)["extra_info"],
        }

    output = args.output or FOLDER / family.env / "generated" / f"{args.split}-{args.start}-{end - 1}.jsonl"
    digest = hashlib.blake2b(json.dumps(family.options, sort_keys=True).encode(), digest_size=4).hexdigest()
    name = f"{family.env}/{digest}/{args.split}"  # tasks with different options are different tasks
    requests = ({"key": f"{name}/{index}", "index": index} for index in range(args.start, end))
    title = f"generate {family.env}"
    summary = work(requests, record, output, n_total=args.num_samples, concurrency=args.concurrency, title=title)
    print(
        f"{output}: {summary.n_written} tasks written, {summary.n_skipped} existed, {summary.n_failed} failed"
        + (f"; the first: {summary.first_error}" if summary.n_failed else "")
    )
    return int(summary.n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
