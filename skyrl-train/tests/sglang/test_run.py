"""Runs with rollouts sampled by SGLang."""

import json
from functools import partial
from pathlib import Path

import psutil
import pytest
from train_kit.sglang_cpu import COMMAND, OPTIONS, StartServer

from skyrl_train.config.rules import engine as rules
from skyrl_train.entrypoints.main_base import main
from skyrl_train.inference_engines.sglang import engine


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of every step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def run(catch_run: list[str]) -> list[str]:
    return [*catch_run, "generator.backend=sglang", "trainer.policy.optimizer_config.lr=0.001"]


def assert_trains(folder: Path) -> None:
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert row["policy/grad_norm"] > 0
        assert row["environment/avg_steps"] == 5
    assert not (folder / "engine_weights").exists() or not list((folder / "engine_weights").iterdir())


def test_training_updates_the_weights_of_a_running_server_after_each_step(
    run: list[str], tmp_path: Path, start_server: StartServer
) -> None:
    servers = f"generator.remote_inference_engine_urls=[{start_server()}]"
    main([*run, "generator.run_engines_locally=false", servers])
    assert_trains(tmp_path / "skyrl/test_run")


@pytest.mark.parametrize("offload_idle", ["auto", "true"])
def test_training_starts_a_server_and_ends_it(
    offload_idle: str, run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: name)  # it is installed in the environment of the server
    monkeypatch.setattr(engine, "launch_server", partial(engine.launch_server, command=COMMAND))
    children = psutil.Process().children()
    options = [f"+generator.engine_init_kwargs.{name}={value}" for name, value in OPTIONS.items()]
    main([*run, *options, f"trainer.placement.offload_idle={offload_idle}"])
    assert_trains(tmp_path / "skyrl/test_run")
    assert psutil.Process().children() == children
