"""Training on fixed data on a Ray cluster equals that of one process, and ends with its cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file
from sft_runs import metrics, overrides, write_rows
from train_kit.processes import find_descendants

from skyrl_train.entrypoints.cli import main

TRAIN_FOLDER = Path(__file__).parents[2]
SETTINGS = ["trainer.policy.optimizer_config.lr=1e-4", "trainer.ckpt_interval=1"]
pytestmark = pytest.mark.timeout(600)


def assert_same_run(folder: Path, expected: Path) -> None:
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row, expected_row in zip(rows, metrics(expected), strict=True):
        for name in expected_row.keys() & {"train/loss", "val/loss"}:
            assert row[name] == pytest.approx(expected_row[name], rel=0, abs=1e-6), name
    (exported,) = (expected / "skyrl/test_run/export/global_step_6").rglob("*.safetensors")
    tensors = load_file(folder / exported.relative_to(expected))
    for name, tensor in load_file(exported).items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_two_nodes_train_like_one_process(
    start_cluster: Callable[..., Cluster], tiny_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_cluster(1, 1)
    write_rows(tmp_path)
    for name, placement in (("inline", []), ("ray", ["trainer.placement.policy_num_nodes=2"])):
        assert main(["sft", *overrides(tmp_path, tiny_model_path, tmp_path / name, *SETTINGS, *placement)]) == 0
    assert "Reserved 2 × 1 CPU for policy" in caplog.text
    assert_same_run(tmp_path / "ray", tmp_path / "inline")


@pytest.mark.parametrize("command", ["dpo", "reward"])
def test_two_ranks_train_on_pairs_like_one_process(
    command: str, start_cluster: Callable[..., Cluster], tiny_model_path: Path, tmp_path: Path
) -> None:
    start_cluster(2)
    rows = [{"prompt": f"{n} plus 1?", "chosen": f"It is {n + 1}", "rejected": "No" * (n % 3 + 1)} for n in range(14)]
    for name, part in (("train", rows[:11]), ("val", rows[11:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    for name, placement in (("inline", []), ("ray", ["trainer.placement.policy_num_gpus_per_node=2"])):
        run = overrides(tmp_path, tiny_model_path, tmp_path / name, *SETTINGS, *placement)
        assert main([command, *run]) == 0
    assert metrics(tmp_path / "inline")[-1].keys() >= {"train/loss", "val/loss"}
    assert_same_run(tmp_path / "ray", tmp_path / "inline")


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_killed_rank_ends_the_run_with_its_cause_and_the_same_command_resumes(
    n_ranks: int, tiny_model_path: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path)
    placement = ["trainer.placement.launcher=ray", f"trainer.placement.policy_num_gpus_per_node={n_ranks}"]
    run = overrides(tmp_path, tiny_model_path, tmp_path / "killed", *SETTINGS)
    command = [sys.executable, "-m", "skyrl_train.entrypoints.main_sft", *run, *placement]
    options = {
        "cwd": TRAIN_FOLDER,
        "env": os.environ | {"RAY_ADDRESS": "local"},
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with subprocess.Popen(command, **options) as process:
        deadline = time.monotonic() + 200
        while not (tmp_path / "killed/skyrl/test_run/ckpts/global_step_1").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        ranks = list(find_descendants("RankActor", process.pid))
        assert len(ranks) == n_ranks
        ranks[-1].kill()
        _, messages = process.communicate(timeout=100)
    assert process.returncode == 1
    assert messages.count("error: ") == 1
    assert "it was killed" in messages.partition("error: ")[2]
    assert len(metrics(tmp_path / "killed")) < 6
    subprocess.run(command, check=True, **options)
    assert main(["sft", *overrides(tmp_path, tiny_model_path, tmp_path / "inline", *SETTINGS)]) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "inline")


def test_a_request_beyond_the_cluster_is_refused_at_once(
    start_cluster: Callable[..., Cluster], tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_cluster(1, 2)
    write_rows(tmp_path)
    begin = time.monotonic()
    run = overrides(tmp_path, tiny_model_path, tmp_path / "out", "trainer.placement.policy_num_gpus_per_node=3")
    assert main(["sft", *run]) == 1
    assert time.monotonic() - begin < 30
    message = capsys.readouterr().err.partition("error: ")[2]
    assert "asks for 1 × 3 CPUs for policy" in message
    assert "the Ray cluster has 3 CPUs on 2 nodes: 1 + 2" in message
