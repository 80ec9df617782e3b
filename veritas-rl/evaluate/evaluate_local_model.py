"""Evaluate a served model on generated tasks: `python -m evaluate.evaluate_local_model --env lgc-v2 --model …`.

The model is served by any OpenAI-compatible endpoint. Without ids, the tasks come from the validation split. Replies
and scores are appended to `--output`. Rerun the command to evaluate missing tasks.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from data_processing.arguments import add_endpoint, add_family, chat_model, not_negative, positive
from data_processing.jobs import Record, ToolError, read_records, run_tool, work
from skyrl_gym.tasks import DynamicEnvDataset, task_family
from skyrl_train.config.rules.run import find_wandb_problem


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_family(parser, default="lgc-v2")
    add = parser.add_argument
    ids = parser.add_mutually_exclusive_group()
    ids.add_argument("--task-id", type=not_negative, nargs="+", help="ids of tasks")
    ids.add_argument("--task-id-range", type=not_negative, nargs=2, metavar=("FIRST", "LAST"), help="both included")
    ids.add_argument(
        "--num-tasks", type=positive, default=64, help="tasks of the validation split (default: %(default)s)"
    )
    add("--samples", type=positive, default=1, help="replies per task (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: %(default)s)")
    add("--output", type=Path, default=Path("evaluate/results/rollouts.jsonl"), help="(default: %(default)s)")
    add("--wandb-project", help="log the scores to this project of Weights & Biases, e.g. lgc-v2-Benchmark")
    add("--wandb-name", help="name of that run (default: the model)")
    add_endpoint(parser, model=None, base_url="http://localhost:30000/v1", timeout=300)
    args = parser.parse_args(argv)
    return run_tool(lambda: evaluate(args))


def evaluate(args: argparse.Namespace) -> int:
    """Run the tasks, write and print the summary, and log it."""
    if args.wandb_project and (problem := find_wandb_fault()):
        raise ToolError(problem)
    family = task_family(args.env, args.adapter_config)
    if args.task_id_range and args.task_id_range[0] > args.task_id_range[1]:
        raise ToolError(f"--task-id-range {args.task_id_range} must be the first and the last id")
    if args.task_id_range:
        task_ids = list(range(args.task_id_range[0], args.task_id_range[1] + 1))
    elif args.task_id:
        task_ids = args.task_id
    else:
        options = {"env": family.env, "adapter_config": args.adapter_config, "num_val_tasks": args.num_tasks}
        dataset = DynamicEnvDataset(config={"custom_cls": {"config": options}}, split="validation")
        task_ids = [dataset.task_id(index) for index in range(len(dataset))]
    ask = chat_model(args, args.temperature)

    def play(request: Record) -> Record:
        task = family.generate(request["task_id"])
        reply = ask([{"role": "user", "content": task.prompt}])
        score = family.score(reply, task)
        return {**request, "task_type": task.task_type, "prompt": task.prompt, "reply": reply, "score": score}

    settings = [family.env, family.options, args.model, args.base_url, args.temperature, args.max_tokens]
    setup = json.dumps(settings, sort_keys=True)
    requests: list[Record] = [
        {"key": f"{setup}/{task_id}/{sample}", "task_id": task_id, "sample": sample}
        for task_id in dict.fromkeys(task_ids)
        for sample in range(args.samples)
    ]
    title = f"evaluate {args.model}"
    concurrency = args.max_concurrent
    summary = work(requests, play, args.output, n_total=len(requests), concurrency=concurrency, title=title)
    wanted = {request["key"] for request in requests}
    played = [record for record in read_records(args.output) if record.get("key") in wanted]
    result = _report(args, family.env, played, summary.n_failed)
    if args.wandb_project:
        _log_to_wandb(args, family.env, played, result)
    if summary.n_failed:
        print(f"{summary.n_failed} replies failed; the first: {summary.first_error}. Rerun the command to retry")
    return int(summary.n_failed > 0)


def find_wandb_fault() -> str | None:
    """Return why Weights & Biases cannot be used (missing package or login), or None if it can."""
    if importlib.util.find_spec("wandb") is None:
        return "--wandb-project needs the package wandb; pip install wandb, or leave the flag out"
    problem = find_wandb_problem(os.environ)
    return None if problem is None else problem.replace("trainer.logger=wandb", "--wandb-project")


def _log_to_wandb(args: argparse.Namespace, env: str, played: list[Record], result: Record) -> None:
    """Log each reply's score with the running mean, and the summary."""
    import wandb

    config = {name: str(value) for name, value in vars(args).items() if not name.startswith("wandb_")}
    with wandb.init(project=args.wandb_project, name=args.wandb_name or args.model, config=config) as run:
        total = 0.0
        for count, record in enumerate(played, start=1):
            total += record["score"]
            run.log({f"{env}/score": record["score"], f"{env}/avg_score": total / count, f"{env}/count": count})
        run.summary.update({f"{env}/{name}/avg_score": value for name, value in result["task_type_scores"].items()})
        run.summary[f"{env}/failed"] = result["failed"]


def _report(args: argparse.Namespace, env: str, played: list[Record], n_failed: int) -> Record:
    """Write the summary next to the rollouts, print it and return it. Failed requests are counted, not scored as 0."""
    types = sorted({record["task_type"] for record in played})
    scores = {name: [record["score"] for record in played if record["task_type"] == name] for name in types}
    everything = [record["score"] for record in played]
    result = {
        "environment": env,
        "model": args.model,
        "total_samples": len(played),
        "failed": n_failed,
        "average_score": statistics.fmean(everything) if everything else None,
        "task_type_scores": {name: statistics.fmean(values) for name, values in scores.items()},
    }
    path = args.output.with_suffix(".summary.json")
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, values in scores.items():
        print(f"{name:<34} {statistics.fmean(values):.3f}  ({len(values)} replies)")
    if everything:
        print(f"{'all':<34} {statistics.fmean(everything):.3f}  ({len(everything)} replies); {args.output}")
    return result


if __name__ == "__main__":
    sys.exit(main())
