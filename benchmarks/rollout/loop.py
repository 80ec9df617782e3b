"""`make bench-loop`: what the agent loop costs, on five-turn Catch with a real tokenizer and an idle engine.

Writes `loop.md` beside this file. Time is that of the whole process per turn, the environment's own included; memory
is what the process grows by while all trajectories are in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from conditions import conditions

from examples.catch.catch_dataset import CatchDataset
from examples.catch.main_catch import register_catch
from examples.catch.players import conversation, random_player
from skyrl_train.config import load_config
from skyrl_train.entrypoints.command import collect_rarely
from skyrl_train.generators.base import BatchMetadata, RolloutRequest
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, SamplingParams
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.models.tiny import train_tokenizer
from skyrl_train.types import PromptRow, TrajectoryID, WeightSpan

HERE = Path(__file__).parent
N_TURNS = 5
GOAL_US, GOAL_KB = 120, 15


class NullEngine:
    """Answers at once, always with the same token; notes how much memory the process has meanwhile."""

    context_length = 1 << 20

    def __init__(self, token_id: int) -> None:
        self._result = EngineResult([token_id], [-0.5], "length", (WeightSpan(0, 1),))
        self._n_calls = 0
        self.most_bytes = 0

    async def generate(self, requests: list[EngineRequest], on_tokens: object = None) -> list[EngineResult]:
        await asyncio.sleep(0)
        self._n_calls += 1
        if self._n_calls % 1000 == 0:
            self.most_bytes = max(self.most_bytes, psutil.Process().memory_info().rss)
        return [self._result for _ in requests]

    def end_session(self, session_id: str) -> None:
        """Nothing is kept."""


async def measure(tokenizer_path: str, n_trajectories: int, n_workers: int) -> tuple[float, float]:
    """Microseconds per turn, and kilobytes per trajectory."""
    tokenizer = load_tokenizer(tokenizer_path)
    environment = {"env_class": "catch", "skyrl_gym": {"max_env_workers": n_workers}}
    cfg = load_config({"generator": {"max_turns": N_TURNS}, "environment": environment})
    engine = NullEngine(tokenizer("L", add_special_tokens=False)["input_ids"][0])
    generator = SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, engine, tokenizer)  # type: ignore[arg-type]
    rows = [dict(row) for row in CatchDataset(train_size=n_trajectories // 16).train_rows()]
    requests = [
        RolloutRequest(
            TrajectoryID(str(i), k), PromptRow(str(i), row["prompt"], "catch", {"extra_info": row["extra_info"]})
        )
        for i, row in enumerate(rows)
        for k in range(16)
    ]
    collect_rarely()
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    trajectories = await generator.rollout(requests, SamplingParams(max_new_tokens=1), BatchMetadata(1, "train"))
    seconds = time.perf_counter() - started
    await generator.close()
    n_turns = sum(len(t.turns) for t in trajectories)
    assert n_turns == N_TURNS * n_trajectories
    return seconds / n_turns * 1e6, (engine.most_bytes - before) / n_trajectories / 1024


def in_process(tokenizer_path: str, n_trajectories: int, n_workers: int) -> tuple[float, float]:
    """The same in a process of its own, whose memory nobody has used before."""
    command = [sys.executable, __file__, "--measure", tokenizer_path, str(n_trajectories), str(n_workers)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    microseconds, kilobytes = json.loads(output.splitlines()[-1])
    return microseconds, kilobytes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n_times", type=int, default=5)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    register_catch()
    if options.measure:
        path, n_trajectories, n_workers = options.measure
        print(json.dumps(asyncio.run(measure(path, int(n_trajectories), int(n_workers)))))
        return
    lines = [
        "# The agent loop",
        "",
        f"`make bench-loop`, {conditions()}. Median of {options.n_times} runs, each in a process of its own, of "
        f"five-turn Catch with an engine that answers at once. Goals: {GOAL_US} µs and {GOAL_KB} KB.",
        "",
        "| trajectories in flight | environment calls | µs per turn | KB per trajectory |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        player = random_player(seed=0)
        games = (conversation(row, player) for row in CatchDataset(train_size=50).train_rows())
        train_tokenizer(games).save_pretrained(folder)
        for n_trajectories in (2048, 4096):
            for n_workers, name in ((32, "in threads (default)"), (0, "inline")):
                runs = [in_process(folder, n_trajectories, n_workers) for _ in range(options.n_times)]
                microseconds, kilobytes = (statistics.median(values) for values in zip(*runs, strict=True))
                lines.append(f"| {n_trajectories:,} | {name} | {microseconds:.0f} | {kilobytes:.1f} |")
                print(lines[-1], flush=True)
    (HERE / "loop.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
