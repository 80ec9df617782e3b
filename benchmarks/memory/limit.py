"""Train SmolLM2-135M-Instruct with little more and with less memory than planned: `make bench-memory-limit`, as root.

Each run is in a control group with a limit. At the planned peak plus 10% it must finish. At the planned peak minus 15%,
the plan must refuse it before it loads the model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from precision import command, variables

CGROUPS = Path("/sys/fs/cgroup")


def run_limited(arguments: list[str], n_bytes: int, log: Path) -> tuple[int, int]:
    """Run a command in a new control group with `n_bytes` of memory. Return its exit status and its peak in bytes.

    A run resets its peak after each stage, so this peak is the last stage's: the end of the run.
    """
    is_v1 = (CGROUPS / "memory").is_dir()
    group = CGROUPS / ("memory" if is_v1 else "") / f"skyrl-{n_bytes}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(n_bytes))
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        with log.open("w") as file:
            process = subprocess.Popen([*enter, *arguments], stdout=file, stderr=file, env=variables())
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)  # otherwise Popen waits for it again
            return process.returncode, usage.ru_maxrss * 1024
    finally:
        group.rmdir()


def compare(model: Path, folder: Path) -> None:
    """Plan a run, then start it with each limit. Exit with status 1 if one does not end as it must."""
    train = [
        *command("grpo", "float32, AdamW", 1, folder, model),
        "trainer.ckpt_interval=10",
        "trainer.max_training_steps=15",
    ]
    planning = [*train[:3], "plan", "--json", *train[4:]]
    done = subprocess.run(planning, capture_output=True, text=True, env=variables(), check=True)
    peak = max(json.loads(done.stdout)["totals"]["host"].values())
    for share, is_enough in ((1.1, True), (0.85, False)):
        status, _ = run_limited(train, int(share * peak), folder / "run.log")
        last = (folder / "run.log").read_text().splitlines()[-1]
        print(f"planned {peak / 1e9:.2f} GB, limit {share:.0%}: exit status {status}: {last}", flush=True)
        if (status == 0) != is_enough or ("GB" not in last and not is_enough):
            sys.exit(1)


def main() -> None:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    model = options.parse_args().model.resolve()
    with tempfile.TemporaryDirectory() as folder:
        compare(model, Path(folder))


if __name__ == "__main__":
    main()
