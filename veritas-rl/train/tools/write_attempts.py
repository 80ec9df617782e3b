"""Write tasks with answers to other tasks: `python train/tools/write_attempts.py --env openspiel --output
file.jsonl`.

Fine-tuning a tiny model on these rows teaches it the answer format, so that some rollouts earn a reward and GRPO has a
signal.
"""

import argparse
import json
import math
import random
import sys
from pathlib import Path

from skyrl_gym.tasks import DynamicEnvDataset, task_family

SEED = 0
N_ROWS_PER_ANSWER = 6
"""Number of rows that share an answer. Solving a task of OpenSpiel plays thousands of random games."""


def main() -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", required=True, help="task family")
    parser.add_argument("--adapter-config", type=json.loads, default={}, help="options of the family, as JSON")
    parser.add_argument("--num-samples", type=int, default=360, help="number of rows (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    try:
        family = task_family(args.env, args.adapter_config)
    except ValueError as error:
        parser.error(str(error))
    dataset = DynamicEnvDataset(config={"custom_cls": {"config": {"env": args.env, "adapter_config": family.options}}})
    rng = random.Random(SEED)
    indices = rng.sample(range(len(dataset)), min(args.num_samples, len(dataset)))
    tasks = [family.generate(dataset.task_id(index)) for index in indices]
    solved = rng.sample(tasks, math.ceil(len(tasks) / N_ROWS_PER_ANSWER))
    answers = []
    for n_solved, task in enumerate(solved, 1):
        answers.append(family.solve(task))
        if n_solved % 20 == 0 or n_solved == len(solved):
            sys.stderr.write(f"Solved {n_solved} of {len(solved)} tasks of {args.env}\n")
    rows = ({"prompt": task.prompt, "response": rng.choice(answers)} for task in tasks)
    args.output.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
