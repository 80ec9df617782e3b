"""A small run folder with metrics, evaluations and training trajectories."""

import os
import socket
from pathlib import Path
from typing import Any

from report_kit.runs import write_metrics, write_rows
from skyrl_report.run_folder import RunFolder

N_STEPS = 8


def write_session(folder: RunFolder, **fields: Any) -> None:
    """Write the session of this process, which is alive."""
    alive = {"total_steps": 20, "first_step": 0, "started_at": 0.0, "host": socket.gethostname(), "pid": os.getpid()}
    write_rows(folder.session, [alive | fields])


def row(uid: str, reward: float | None, **fields: Any) -> dict[str, Any]:
    """Return a trajectory of a game of two turns as a run writes it."""
    return {
        "input_prompt": "<|im_start|>user\nWhere is <the> ball?<|im_end|>\n<|im_start|>assistant\n",
        "output_response": "L<|im_end|>\n<|im_start|>user\nNow?<|im_end|>\n<|im_start|>assistant\nR",
        "score": None if reward is None else [0.0, reward],
        "total_reward": reward,
        "is_success": bool(reward and reward > 0),
        "stop_reason": "length",
        "env_class": "catch",
        "env_extras": {"data_source": "synthetic", "seed": 3},
        "env_metrics": {"caught": int(bool(reward and reward > 0))},
        "data_source": "synthetic",
        "uid": uid,
        "turns": [
            {"start": 0, "end": 1, "prompt_length": 9, "reward": 0.0, "stop_reason": "length", "segment": 0},
            {"start": 5, "end": 6, "prompt_length": 14, "reward": reward, "stop_reason": "length", "segment": 0},
        ],
        "error": None,
    } | fields


def write_example(path: Path, n_steps: int = N_STEPS) -> RunFolder:
    """Write a run of reinforcement learning that is in progress."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    step = {"timing/step": 2.0, "timing/generate": 1.5, "trainer/tokens_per_second": 5000.0, "system/memory_usage": 1.5}
    metrics = [
        step | {"reward/avg_raw_reward": i / 10, "policy/policy_entropy": 1.0 - i / 20} for i in range(n_steps + 1)
    ]
    metrics[0] = {"eval/all/avg_score": -0.5}
    metrics[n_steps] |= {"eval/all/avg_score": 0.5, "timing/eval": 4.0}
    write_metrics(folder.metrics, metrics)
    folder.config_yaml.write_text("trainer: {seed: 7, algorithm: {eps_clip_low: 0.2}}\n")
    folder.train_log.write_text(
        "2026-01-02 03:04:05,678 INFO skyrl_train.run: fine\n"
        "2026-01-02 03:04:06,678 WARNING skyrl_train.run: The disk is slow\n"
    )
    for i in (0, n_steps):
        write_rows(folder.evals(i) / "synthetic.jsonl", [row("0_0", 1.0), row("1_0", -1.0 if i == 0 else 1.0)])
    for i in range(1, n_steps + 1):
        rows = [row(f"{prompt}_{sample}", (-1.0) ** sample) for prompt in (i, 99) for sample in range(2)]
        write_rows(folder.trajectories(i), rows)
    write_session(folder)
    return folder
