"""`make bench-loop`: the overhead of the agent loop, with a real tokenizer and an engine that answers immediately.

The workloads are five-turn Catch with thousands of trajectories in flight, and conversations of up to 400 turns. The
time includes the environment. The memory is the growth of the process while all trajectories are in flight. The script
writes `loop.md` next to this file.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from harness import conditions

from examples.catch.catch_dataset import CatchDataset
from examples.catch.main_catch import register_catch
from examples.catch.players import conversation, random_player
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config import load_config
from skyrl_train.entrypoints.base import collect_rarely
from skyrl_train.entrypoints.tiny import train_tokenizer
from skyrl_train.generators.base import BatchMetadata, RolloutRequest
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult, SamplingParams
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.types import Message, PromptRow, TrajectoryID, WeightSpan

HERE = Path(__file__).parent
N_TURNS = 5
LONG_TURNS, N_LONG, REPLY = (50, 100, 200, 400), 16, "go left, then right, and stay " * 2
GOAL_US, GOAL_KB = 120, 15


class NullEngine:
    """An engine that always returns the same tokens immediately, and records the process's peak memory."""

    info = EngineInfo(context_length=1 << 20, longest_sequence=1 << 20)

    def __init__(self, token_ids: list[int]) -> None:
        spans = (WeightSpan(0, len(token_ids)),)
        self._result = EngineResult(token_ids, [-0.5] * len(token_ids), "length", spans)
        self._n_calls = 0
        self.peak_bytes = 0

    async def generate(self, requests: list[EngineRequest]) -> list[EngineResult]:
        await asyncio.sleep(0)
        self._n_calls += 1
        if self._n_calls % 1000 == 0:
            self.peak_bytes = max(self.peak_bytes, psutil.Process().memory_info().rss)
        return [self._result for _ in requests]

    async def end_session(self, session_id: str) -> None:
        """Do nothing: there is no cache."""


class ConstantReplyEnv(BaseTextEnv):
    """An environment that answers every reply with the same observation, for `max_turns` turns."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.max_turns = extras["max_turns"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        observations = [{"role": "user", "content": REPLY}]
        return BaseTextEnvStepOutput(
            observations=observations, reward=0.0, done=self.turns >= self.max_turns, metadata={}
        )


async def measure_catch(tokenizer_path: str, n_trajectories: int, n_workers: int) -> tuple[float, float]:
    """Measure microseconds per turn and kilobytes per trajectory."""
    tokenizer = load_tokenizer(tokenizer_path)
    environment = {"env_class": "catch", "skyrl_gym": {"max_env_workers": n_workers}}
    cfg = load_config({"generator": {"max_turns": N_TURNS}, "environment": environment})
    engine = NullEngine(tokenizer("L", add_special_tokens=False)["input_ids"])
    generator = GymGenerator(cfg.generator, cfg.environment.skyrl_gym, engine, tokenizer)  # type: ignore[arg-type]
    rows = [dict(row) for row in CatchDataset(train_size=n_trajectories // 16).train_rows()]
    requests = [
        RolloutRequest(
            TrajectoryID(str(i), k), PromptRow(str(i), row["prompt"], "catch", {"extra_info": row["extra_info"]})
        )
        for i, row in enumerate(rows)
        for k in range(16)
    ]
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    trajectories = await generator.rollout(requests, SamplingParams(max_new_tokens=1), BatchMetadata(1, "train"))
    seconds = time.perf_counter() - started
    await generator.close()
    n_turns = sum(len(t.turns) for t in trajectories)
    assert n_turns == N_TURNS * n_trajectories
    return seconds / n_turns * 1e6, (engine.peak_bytes - before) / n_trajectories / 1024


async def measure_long(tokenizer_path: str, n_turns: int) -> tuple[float, float]:
    """Measure tokens per trajectory and microseconds per token."""
    tokenizer = load_tokenizer(tokenizer_path)
    cfg = load_config({"generator": {"max_turns": n_turns}, "environment": {"env_class": "listener"}})
    engine = NullEngine(tokenizer(REPLY, add_special_tokens=False)["input_ids"])
    generator = GymGenerator(cfg.generator, cfg.environment.skyrl_gym, engine, tokenizer)  # type: ignore[arg-type]
    prompt = [Message(role="user", content="Where to?")]
    requests = [
        RolloutRequest(TrajectoryID(str(i), 0), PromptRow(str(i), prompt, "listener", {})) for i in range(N_LONG)
    ]
    started = time.perf_counter()
    trajectories = await generator.rollout(requests, SamplingParams(max_new_tokens=99), BatchMetadata(1, "train"))
    seconds = time.perf_counter() - started
    await generator.close()
    assert {len(t.turns) for t in trajectories} == {n_turns}
    n_tokens = sum(t.n_tokens for t in trajectories)
    return n_tokens / N_LONG, seconds / n_tokens * 1e6


MEASUREMENTS = {"catch": measure_catch, "long": measure_long}


def medians(n_times: int, measurement: str, *arguments: object) -> tuple[float, float]:
    """Return the medians of several runs. Each runs in a fresh process, for a clean memory measurement."""
    command = [sys.executable, __file__, "--measure", measurement, *map(str, arguments)]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(n_times)]
    first, second = zip(*(json.loads(output.splitlines()[-1]) for output in outputs), strict=True)
    return statistics.median(first), statistics.median(second)


def report(folder: str, n_times: int) -> list[str]:
    """Return the lines of `loop.md`."""
    lines = [
        "# Overhead of the agent loop",
        "",
        f"`make bench-loop`, {conditions()}. Medians of {n_times} runs, with an engine that answers immediately.",
        "",
        f"Five-turn Catch. The goals are {GOAL_US} µs and {GOAL_KB} KB:",
        "",
        "| trajectories in flight | environment calls | µs per turn | KB per trajectory |",
        "|---|---|---|---|",
    ]
    for n_trajectories in (2048, 4096):
        for n_workers, name in ((32, "in threads (default)"), (0, "inline")):
            microseconds, kilobytes = medians(n_times, "catch", folder, n_trajectories, n_workers)
            lines.append(f"| {n_trajectories:,} | {name} | {microseconds:.0f} | {kilobytes:.1f} |")
            print(lines[-1], flush=True)
    lines += [
        "",
        f"{N_LONG} concurrent conversations. Time is linear in the number of tokens if the last column is constant:",
        "",
        "| turns | tokens per trajectory | µs per token |",
        "|---|---|---|",
    ]
    for n_turns in LONG_TURNS:
        n_tokens, microseconds = medians(n_times, "long", folder, n_turns)
        lines.append(f"| {n_turns} | {n_tokens:,.0f} | {microseconds:.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n_times", type=int, default=5)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    register_catch()
    register("listener", ConstantReplyEnv)
    if options.measure:
        measurement, path, *numbers = options.measure
        with collect_rarely():
            print(json.dumps(asyncio.run(MEASUREMENTS[measurement](path, *map(int, numbers)))))
        return
    with tempfile.TemporaryDirectory() as folder:
        player = random_player(seed=0)
        games = (conversation(row, player) for row in CatchDataset(train_size=50).train_rows())
        train_tokenizer(games).save_pretrained(folder)
        (HERE / "loop.md").write_text("\n".join(report(folder, options.n_times)) + "\n")


if __name__ == "__main__":
    main()
