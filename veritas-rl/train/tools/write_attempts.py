"""Write tasks with the answers of different tasks: `python train/tools/write_attempts.py --env openspiel --output
file.jsonl`.

Fine-tuning a tiny model on these rows teaches it the answer format, so that some rollouts earn a reward and GRPO has a
signal.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from skyrl_gym.tasks import DynamicEnvDataset, task_family

SEED = 0


def main() -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", required=True, help="task family")
    parser.add_argument("--adapter-config", type=json.loads, default={}, help="options of the family, as JSON")
    parser.add_argument("--num-samples", type=int, default=360, help="number of rows (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    family = task_family(args.env, args.adapter_config)
    dataset = DynamicEnvDataset(config={"custom_cls": {"config": {"env": args.env, "adapter_config": family.options}}})
    rng = random.Random(SEED)
    indices = rng.sample(range(len(dataset)), min(args.num_samples, len(dataset)))
    tasks = [family.generate(dataset.task_id(index)) for index in indices]
    answers = [family.solve(task) for task in rng.sample(tasks, len(tasks))]
    lines = (
        json.dumps({"prompt": task.prompt, "response": answer}) for task, answer in zip(tasks, answers, strict=True)
    )
    args.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
