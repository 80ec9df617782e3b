"""Training on fixed data under torchrun: two ranks train like one process, and end together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sft_runs import metrics, overrides, pair_overrides, write_pairs, write_rows
from train_kit.checkpoints import assert_a_changed_byte_is_named

from skyrl_train.config.cli import parse
from skyrl_train.config.run import RunPlacementConfig
from skyrl_train.config.sft import SFT
from skyrl_train.entrypoints.cli import main
from skyrl_train.entrypoints.sft import SFTExp
from skyrl_train.errors import ConfigError
from skyrl_train.launch import torchrun as torchrun_module
from skyrl_train.launch.torchrun import DRIVER, Torchrun, _accept_ranks
from skyrl_train.weight_sync import SyncOptions

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
COMMAND = [*TORCHRUN, "-m", "skyrl_train.entrypoints.main_sft"]
SKYRL = [*TORCHRUN, "--no-python", str(Path(sys.executable).with_name("skyrl"))]
STRATEGY = ["trainer.strategy=megatron"]
TENSOR = [*STRATEGY, "trainer.policy.megatron_config.tensor_model_parallel_size=2"]
PIPELINE = [*STRATEGY, "trainer.policy.megatron_config.pipeline_model_parallel_size=2"]
LORA = ["trainer.policy.model.lora.rank=4"]
OPTIONS: dict[str, Any] = {
    "cwd": Path(__file__).parents[3],
    "env": os.environ | {"OMP_NUM_THREADS": "1"},
    "stdout": subprocess.PIPE,
    "stderr": subprocess.STDOUT,
    "text": True,
}

nightly = pytest.mark.nightly


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_rows(tmp_path)
    return tmp_path


def assert_same_run(folder: Path, expected: Path) -> None:
    """Assert that two runs have the same losses, and the same weights up to rounding."""
    rows = metrics(folder)
    assert len(rows) > 3
    for row, expected_row in zip(rows, metrics(expected), strict=True):
        for name in ("train/loss", "val/loss"):
            if name in expected_row:
                assert row[name] == pytest.approx(expected_row[name], rel=1e-6), name
        assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-6)
    (exported,) = (expected / "skyrl/test_run/export").rglob("*.safetensors")
    tensors = load_file(folder / exported.relative_to(expected))
    for name, tensor in load_file(exported).items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("lora", "sequence_parallel_size"),
    [([], 1), (LORA, 2), pytest.param([], 2, marks=nightly), pytest.param(LORA, 1, marks=nightly)],
)
def test_two_ranks_train_like_one_process(
    lora: list[str], sequence_parallel_size: int, data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    learning_rate = "trainer.policy.optimizer_config.lr=1e-4"  # Adam magnifies rounding
    assert main(["sft", *overrides(data, tiny_model_path, tmp_path / "one", learning_rate, *lora)]) == 0
    run = overrides(data, tiny_model_path, tmp_path / "two", learning_rate, *lora)
    division = f"trainer.policy.sequence_parallel_size={sequence_parallel_size}"
    finished = subprocess.run([*COMMAND, *run, division], check=False, **OPTIONS)
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.count("Loaded the policy") == 1, "every rank logs"
    assert_same_run(tmp_path / "two", tmp_path / "one")
    checkpoint = tmp_path / "two/skyrl/test_run/ckpts/global_step_6"
    assert {f"policy/{name}" for name in ("__1_0.distcp", "rng_1.pt")} <= {
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*")
    }
    assert_a_changed_byte_is_named(checkpoint)


def test_a_command_line_of_verl_starts_its_ranks_with_torchrun(
    data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings are checked before torchrun starts, and logged once."""
    program = ["verl", "torchrun", "--nnodes=1", "--nproc_per_node=2", "--max-restarts=0"]
    program += ["-m", "verl.trainer.fsdp_sft_trainer"]
    one, two = ([*overrides(data, tiny_model_path, tmp_path / name), "optim.lr=1e-4"] for name in ("one", "two"))
    assert main([*program, *two, "trainer.log_interval=1"]) == 1
    assert main([*program, *two, "--dry-run"]) == 0
    output = capsys.readouterr()
    assert "error: trainer.log_interval=1: there is no key" in output.err
    assert "processes    2 of torchrun" in output.out
    assert main(["verl", "fsdp_sft_trainer", *one]) == 0
    finished = subprocess.run([SKYRL[-1], *program, *two], check=False, **OPTIONS)
    assert finished.returncode == 0, finished.stdout
    for line in (
        "optim.lr=0.0001 is read as",
        "--nproc_per_node=2 is read as",
        "defaults of verl:",
        "--max-restarts=0",
    ):
        assert finished.stdout.count(line) == 1, line
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert list(tmp_path.glob("two/skyrl/test_run/ckpts/global_step_6/policy/__1_0.distcp"))


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        (
            "torchrun --nnodes=2 --nproc_per_node=2",
            "--rdzv_endpoint=<first node>:29400 --no-python skyrl … on each node",
        ),
        ("torchrun --nproc_per_node=gpu", "trainer.placement.policy_num_gpus_per_node=gpu must be an integer >= 1"),
    ],
)
def test_a_command_line_that_does_not_say_which_ranks_to_start_is_refused(
    launcher: str, message: str, data: Path, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"{launcher} -m verl.trainer.fsdp_sft_trainer".split()
    assert main(["verl", *program, *overrides(data, tiny_model_path, tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err


def test_a_script_whose_ranks_torchrun_has_not_started_is_refused(
    data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    placement = ["trainer.placement.launcher=torchrun", "trainer.placement.policy_num_gpus_per_node=2"]
    experiment = SFTExp(parse([*overrides(data, tiny_model_path, tmp_path / "out"), *placement], SFT))
    with pytest.raises(ConfigError, match="takes 2 processes, and torchrun has not started this one"):
        experiment.run()


@pytest.mark.parametrize(
    ("command", "lora"),
    [
        ("dpo", []),
        ("reward", LORA),
        pytest.param("dpo", LORA, marks=nightly),
        pytest.param("reward", [], marks=nightly),
    ],
)
def test_two_ranks_train_on_pairs_like_one_process(
    command: str, lora: list[str], tiny_model_path: Path, tmp_path: Path
) -> None:
    """DPO of all weights has a frozen copy as its reference, on the same ranks."""
    write_pairs(tmp_path)
    settings = ["trainer.policy.optimizer_config.lr=1e-4", *lora]
    assert main([command, *pair_overrides(tmp_path, tiny_model_path, tmp_path / "one", *settings)]) == 0
    run = pair_overrides(tmp_path, tiny_model_path, tmp_path / "two", *settings)
    finished = subprocess.run([*SKYRL, command, *run], check=False, **OPTIONS)
    assert finished.returncode == 0, finished.stdout
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.megatron
def test_dpo_with_megatron_has_a_reference_on_the_same_ranks(tiny_model_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    write_pairs(tmp_path)
    settings = ["trainer.policy.optimizer_config.lr=1e-4"]
    assert main(["dpo", *pair_overrides(tmp_path, tiny_model_path, tmp_path / "one", *settings)]) == 0
    run = pair_overrides(tmp_path, tiny_model_path, tmp_path / "two", *settings, *PIPELINE)
    finished = subprocess.run([*SKYRL, "dpo", *run], check=False, **OPTIONS)
    assert finished.returncode == 0, finished.stdout
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("command", "n_resuming", "sharding", "lora"),
    [
        ("sft", 2, [], []),
        pytest.param("dpo", 1, [], [], marks=nightly),
        pytest.param("reward", 2, [], [], marks=nightly),
        pytest.param("sft", 2, TENSOR, [], marks=[pytest.mark.megatron, nightly]),
        pytest.param("sft", 2, TENSOR, LORA, marks=[pytest.mark.megatron, nightly]),
    ],
)
def test_a_killed_rank_ends_the_run_with_its_cause_and_the_same_command_resumes(
    command: str, n_resuming: int, sharding: list[str], lora: list[str], tiny_model_path: Path, tmp_path: Path
) -> None:
    if sharding:
        pytest.importorskip("megatron.core")
    (write_rows if command == "sft" else write_pairs)(tmp_path)
    settings = ["trainer.ckpt_interval=1", "trainer.policy.optimizer_config.lr=1e-4", *lora]
    make_overrides = overrides if command == "sft" else pair_overrides
    run = [command, *make_overrides(tmp_path, tiny_model_path, tmp_path / "killed", *settings, *sharding)]
    folder = tmp_path / "killed/skyrl/test_run"
    with subprocess.Popen([*SKYRL, *run], **OPTIONS) as process:
        deadline = time.monotonic() + 200
        while not (folder / "ckpts/global_step_1").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        workers = psutil.Process(process.pid).children()
        (second,) = (worker for worker in workers if worker.environ()["RANK"] == "1")
        second.kill()
        messages, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert not any(worker.is_running() for worker in workers)
    assert len(metrics(tmp_path / "killed")) < (6 if command == "sft" else 4)
    assert messages.count("error: ") <= 1, messages  # torchrun may end rank 0 first
    finished = subprocess.run([*SKYRL[-1 if n_resuming == 1 else 0 :], *run], check=False, **OPTIONS)
    assert finished.returncode == 0, finished.stdout
    assert "Resumed from" in finished.stdout
    assert main([command, *make_overrides(tmp_path, tiny_model_path, tmp_path / "whole", *settings)]) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_dry_run_names_the_ranks_and_ends_them(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    run = overrides(data, tiny_model_path, tmp_path / "out")
    finished = subprocess.run([*COMMAND, *run, "--dry-run"], check=False, timeout=120, **OPTIONS)
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.count("processes    2 of torchrun") == 1


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"launcher": "inline"}, r"trainer\.placement\.launcher=inline, but torchrun has started 4 processes"),
        ({"launcher": "ray"}, r"trainer\.placement\.launcher=ray, but torchrun"),
        ({"policy_num_gpus_per_node": 4}, r"policy_num_gpus_per_node=4, but torchrun has started 2 × 2 processes"),
        ({"policy_num_nodes": 4}, r"policy_num_nodes=4, but torchrun has started 2 × 2 processes"),
    ],
)
def test_settings_for_other_processes_than_those_of_torchrun_are_refused(
    placement: dict[str, Any], message: str
) -> None:
    torchrun = Torchrun(rank=0, size=4, local_rank=0, n_per_node=2)
    torchrun.check(RunPlacementConfig(policy_num_nodes=2, policy_num_gpus_per_node=2))
    torchrun.check(RunPlacementConfig())
    with pytest.raises(ConfigError, match=message):
        torchrun.check(RunPlacementConfig(**placement))


def test_connections_of_other_programs_do_not_delay_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun_module, "HANDSHAKE_TIMEOUT_S", 1)
    store = dist.HashStore()
    monkeypatch.setattr(Torchrun, "store", lambda _: store)
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(_accept_ranks, Torchrun(rank=0, size=2, local_rank=0, n_per_node=2))
        store.wait([DRIVER], timedelta(seconds=10))
        host, port, key = json.loads(store.get(DRIVER))
        with socket.create_connection((host, port)), socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with Connection(socket.create_connection((host, port)).detach()) as rank:
                answer_challenge(rank, bytes.fromhex(key))
                deliver_challenge(rank, bytes.fromhex(key))
                rank.send_bytes((1).to_bytes(4))
                (connection,) = accepting.result(timeout=30).values()
                rank.send_bytes(b"ready")
                assert connection.recv_bytes() == b"ready"
                connection.close()


def test_runs_with_an_engine_are_refused_under_torchrun(
    data: Path, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    experiment = SFTExp(parse(overrides(data, tiny_model_path, tmp_path / "out"), SFT))
    with pytest.raises(ConfigError, match="torchrun has started 2 processes, and this kind of run starts its own"):
        experiment.new_launcher(["policy"], SyncOptions())
