import json
import os
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from train_kit.checkpoints import assert_a_changed_byte_is_named
from train_kit.datasets import write_answers, write_pairs
from train_kit.processes import TRAIN_FOLDER, find_descendants, python, run_torchrun, wait_until, write_commands
from train_kit.runs import assert_close_runs, expect_error, preference_run, run_of, supervised_run, train

from skyrl_train.config.cli import parse
from skyrl_train.config.run import RunPlacementConfig
from skyrl_train.config.supervised import SFT
from skyrl_train.entrypoints.sft import SFTExp
from skyrl_train.errors import ConfigError
from skyrl_train.launch import torchrun as torchrun_module
from skyrl_train.launch.torchrun import DRIVER, Torchrun, _accept_ranks

TENSOR = ["trainer.strategy=megatron", "trainer.policy.megatron_config.tensor_model_parallel_size=2"]
PIPELINE = ["trainer.strategy=megatron", "trainer.policy.megatron_config.pipeline_model_parallel_size=2"]
LORA = ["trainer.policy.model.lora.rank=4"]
SLOWLY = "trainer.policy.optimizer_config.lr=1e-4"  # Adam magnifies rounding
ROUNDING = 1e-4

nightly = pytest.mark.nightly


@pytest.fixture
def overrides_of(tiny_model_path: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Return the overrides of a run of a command in a folder below `tmp_path`."""

    def make(command: str, name: str, *overrides: str) -> list[str]:
        write, run = (write_answers, supervised_run) if command == "sft" else (write_pairs, preference_run)
        return run(tmp_path / name, SLOWLY, *overrides, model=tiny_model_path, data=write(tmp_path))

    return make


def process_options() -> dict[str, Any]:
    """Return the options of a process that starts torchrun."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": python()}
    return {"cwd": TRAIN_FOLDER, "env": env, "text": True}


@pytest.mark.parametrize(
    ("command", "settings", "division"),
    [
        ("sft", LORA, ["trainer.policy.sequence_parallel_size=2"]),
        ("dpo", [], []),  # with a frozen copy as its reference, on the same ranks
        ("reward", LORA, []),
        pytest.param("dpo", [], PIPELINE, marks=pytest.mark.megatron),
        pytest.param("sft", [], ["trainer.policy.sequence_parallel_size=2"], marks=nightly),
        pytest.param("sft", LORA, [], marks=nightly),
        pytest.param("dpo", LORA, [], marks=nightly),
        pytest.param("reward", [], [], marks=nightly),
    ],
)
def test_two_ranks_train_like_one_process(
    command: str, settings: list[str], division: list[str], overrides_of: Callable[..., list[str]], tmp_path: Path
) -> None:
    if division == PIPELINE:
        pytest.importorskip("megatron.core")
    short = [*settings, "trainer.epochs=1"]
    path = os.pathsep.join([str(write_commands(tmp_path)), os.environ["PATH"]])
    ranks = overrides_of(command, "ranks", *short, *division)
    messages = run_torchrun("--no-python", "skyrl", command, *ranks, PATH=path)
    assert messages.count("Loaded the policy") <= 1, "every rank logs"
    assert_close_runs(run_of(ranks), train(*overrides_of(command, "one", *short), command=command), ROUNDING)


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
    command: str, n_resuming: int, sharding: list[str], lora: list[str], overrides_of: Callable[..., list[str]]
) -> None:
    if sharding:
        pytest.importorskip("megatron.core")
    settings = ["trainer.ckpt_interval=1", *lora]
    overrides = overrides_of(command, "killed", *settings, *sharding)
    module = ["-m", "skyrl_train.entrypoints.cli", command]
    torchrun = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **process_options()}
    run = run_of(overrides)
    with subprocess.Popen([*torchrun, *module, *overrides], **options) as process:
        wait_until((run.folder / "ckpts/global_step_1").exists)
        ranks = [rank for rank in find_descendants("entrypoints.cli") if "RANK" in rank.environ()]
        (second,) = (rank for rank in ranks if rank.environ()["RANK"] == "1")
        second.kill()
        messages, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert not any(rank.is_running() for rank in ranks)
    assert len(run.steps) < (6 if command == "sft" else 4)
    assert messages.count("error: ") <= 1, messages  # torchrun may end rank 0 first
    messages = run_torchrun(*module, *overrides, n_ranks=n_resuming)
    assert "Resumed from" in messages
    assert messages.count("Loaded the policy") <= 1, "every rank logs"
    assert_close_runs(run, train(*overrides_of(command, "whole", *settings), command=command), ROUNDING)
    if n_resuming == 2:
        last = run.folder / f"ckpts/global_step_{run.steps[-1]}"
        files = {path.name for path in last.rglob("*")}
        assert files >= {"__1_0.distcp", "rng_1.pt"}
        assert_a_changed_byte_is_named(last)


def test_a_command_line_of_verl_starts_its_ranks_with_torchrun(
    overrides_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings are checked before torchrun starts, and logged once."""
    program = ["torchrun", "--nnodes=1", "--nproc_per_node=2", "--max-restarts=0"]
    program += ["-m", "verl.trainer.fsdp_sft_trainer"]
    one, two = ([*overrides_of("sft", name, "trainer.epochs=1"), "optim.lr=1e-4"] for name in ("one", "two"))
    wrong = expect_error(*program, *two, "trainer.log_interval=1", command="verl")
    assert "error: trainer.log_interval=1: there is no key" in wrong
    train(*program, *two, "--dry-run", command="verl")
    assert "processes    2 of torchrun" in capsys.readouterr().out
    expected = train("fsdp_sft_trainer", *one, command="verl")
    command = [python(), "-m", "skyrl_train.compat.cli", "verl", *program, *two]
    finished = subprocess.run(command, capture_output=True, check=False, **process_options())
    messages = finished.stdout + finished.stderr
    assert finished.returncode == 0, messages
    read = [f"{option} is read as" for option in ("optim.lr=0.0001", "--nproc_per_node=2")]
    for line in (*read, "verl's defaults:", "--max-restarts=0"):
        assert messages.count(line) == 1, line
    assert_close_runs(run_of(two), expected, ROUNDING)
    assert (run_of(two).folder / "ckpts/global_step_2/policy/__1_0.distcp").exists()


def test_a_dry_run_names_the_ranks_and_ends_them(overrides_of: Callable[..., list[str]]) -> None:
    messages = run_torchrun("-m", "skyrl_train.entrypoints.main_sft", *overrides_of("sft", "out"), "--dry-run")
    assert messages.count("processes    2 of torchrun") == 1


# -- settings


def test_a_script_whose_ranks_torchrun_has_not_started_is_refused(overrides_of: Callable[..., list[str]]) -> None:
    placement = ["trainer.placement.launcher=torchrun", "trainer.placement.policy_num_gpus_per_node=2"]
    with pytest.raises(ConfigError, match="needs 2 processes, but torchrun has not started this one"):
        SFTExp(parse(overrides_of("sft", "out", *placement), SFT)).run()


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


def test_runs_with_an_engine_are_refused_under_torchrun(
    overrides_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    experiment = SFTExp(parse(overrides_of("sft", "out"), SFT))
    with pytest.raises(ConfigError, match="torchrun has started 2 processes, but this kind of run starts its own"):
        experiment.new_launcher(["policy"])


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
