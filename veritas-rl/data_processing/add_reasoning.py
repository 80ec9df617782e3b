"""Add a model's explanations to the known answers of generated tasks: `python -m data_processing.add_reasoning --input
…`.

The model is served by any OpenAI-compatible endpoint. An explanation is kept if the task's verifier still accepts an
answer that follows it. The new `answer` is the explanation, "Final Answer:" and the original answer.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from data_processing.arguments import add_endpoint, chat_model, family_folder
from data_processing.jobs import Record, ToolError, read_records, run_tool, work
from skyrl_gym.tasks import read_task
from skyrl_gym.tasks.replies import FINAL_ANSWER, visible_answer
from skyrl_gym.tools.calls import strip_thoughts

REQUEST = """Explain step by step how to solve this task and reach the known answer. Write the explanation alone, as \
if you found the answer yourself; do not mention that it was known, and do not repeat the final answer's format.

Task:
{prompt}

Known answer:
{answer}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="file of data_processing.generate_dataset")
    parser.add_argument("--output", type=Path, help="by default, the same name in the folder reasoned/")
    parser.add_argument("--temperature", type=float, default=0.3, help="sampling temperature (default: %(default)s)")
    add_endpoint(parser, model="gpt-4o-mini", base_url="https://api.openai.com/v1", timeout=600)
    args = parser.parse_args(argv)
    return run_tool(lambda: add_reasoning(args))


def add_reasoning(args: argparse.Namespace) -> int:
    """Add the explanations."""
    records = read_records(args.input)
    for number, record in enumerate(records, start=1):
        missing = [name for name in ("key", "task_id", "prompt", "answer", "extra_info") if name not in record]
        if missing:
            raise ToolError(f"record {number} of {args.input} has no {', '.join(missing)}; generate the file again")
    output = args.output or family_folder(args.input) / "reasoned" / args.input.name
    ask = chat_model(args, args.temperature)

    def reason(record: Record) -> Record:
        request = REQUEST.format(prompt=record["prompt"], answer=record["answer"])
        reasoning = strip_thoughts(ask([{"role": "user", "content": request}])).strip()
        if not reasoning:
            raise ToolError(f"the model gave no explanation of task {record['task_id']}; raise --max-tokens")
        answer = f"{reasoning}\n\n{FINAL_ANSWER}\n{record['answer']}"
        family, task = read_task(record["extra_info"])
        if visible_answer(answer) != visible_answer(record["answer"]) or family.score(answer, task) <= 0:
            raise ToolError(f"the answer of task {record['task_id']} is not accepted after its explanation")
        return {**record, "answer": answer, "reasoning": reasoning, "original_answer": record["answer"]}

    summary = work(
        records, reason, output, n_total=len(records), concurrency=args.max_concurrent, title=f"reason {args.model}"
    )
    print(
        f"{output}: {summary.n_written} explanations written, {summary.n_skipped} existed, {summary.n_failed} failed"
        + (f"; the first: {summary.first_error}. Rerun the command to retry" if summary.n_failed else "")
    )
    return int(summary.n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
