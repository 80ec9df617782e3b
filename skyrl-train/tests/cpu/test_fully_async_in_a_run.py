"""Asynchronous runs with an engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from train_kit.processes import find_descendants, killing

from skyrl_train.config.cli import parse_cli
from skyrl_train.entrypoints.experiment import BasePPOExp
from skyrl_train.entrypoints.main_base import main
from skyrl_train.errors import ConfigError
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl_train.generators.rewards import REWARD_FUNCTIONS, register_reward_function
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator

N_STEPS = 6
TRAIN_FOLDER = Path(__file__).parents[2]


@pytest.fixture
def arguments(catch_run: list[str]) -> list[str]:
    return [
        *catch_run,
        "trainer.fully_async.enabled=true",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        f"trainer.max_training_steps={N_STEPS}",
        "trainer.epochs=4",
        "trainer.eval_interval=3",
        "trainer.ckpt_interval=1",
        "trainer.dump_trajectories=true",
    ]


def logged(tmp_path: Path, name: str = "test_run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / f"skyrl/{name}/metrics.jsonl").read_text().splitlines()]


def assert_prompts_are_trained_once(tmp_path: Path) -> None:
    """Assert that every step trained other prompts of its epoch."""
    folder = tmp_path / "skyrl/test_run/trajectories"
    dumped = [(folder / f"global_step_{step}.jsonl").read_text().splitlines() for step in range(1, N_STEPS + 1)]
    rows = [[json.loads(line)["uid"] for line in lines] for lines in dumped]
    per_epoch = 2  # steps
    for first in range(0, N_STEPS, per_epoch):
        counts = Counter(uid for step in rows[first : first + per_epoch] for uid in step)
        assert set(counts.values()) == {1}, f"in the epoch of step {first + 1}"


def assert_run_is_right(tmp_path: Path, n_checked: int = 1) -> None:
    """Assert that a run used its prompts once, with bounded staleness, and compared log-probs after some syncs."""
    steps = logged(tmp_path)
    assert [step["step"] for step in steps] == list(range(N_STEPS + 1))
    staleness = [step["async/staleness_max"] for step in steps[1:]]
    assert set(staleness) <= {0, 1}
    assert max(staleness) == 1, "rollouts never ran ahead"
    assert [step["sync/logprob_gap"] < 1e-5 for step in steps if "sync/logprob_gap" in step] == [True] * n_checked
    assert all(step["sync/verified_copies"] == 1 for step in steps)
    assert all(step["async/staleness_violation_count"] == 0 for step in steps[1:])
    assert_prompts_are_trained_once(tmp_path)


@pytest.mark.parametrize("in_flight", ["true", "false"])
def test_an_engine_that_is_killed_is_replaced_and_no_prompt_is_lost(
    in_flight: str, arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with killing("spawn_main", tmp_path / "skyrl/test_run", n_steps=2):
        main([*arguments, f"trainer.fully_async.in_flight_weight_updates={in_flight}"])
    assert "The engine was lost and is replaced" in caplog.text
    assert_run_is_right(tmp_path, n_checked=1 if in_flight == "true" else N_STEPS + 1)
    assert not list(find_descendants("spawn_main"))


def test_a_killed_run_resumes_with_the_prompts_in_progress(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.catch.main_catch", *arguments]
    with subprocess.Popen(command, cwd=TRAIN_FOLDER, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "skyrl/test_run/ckpts/global_step_2").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        (engine,) = find_descendants("spawn_main", process.pid)
        process.kill()
        process.wait()
    _, running = psutil.wait_procs([engine], timeout=30)
    assert not running, "the engine outlived its run"
    subprocess.run(command, cwd=TRAIN_FOLDER, check=True, env=os.environ)
    assert_run_is_right(tmp_path)


def test_without_staleness_a_run_trains_as_a_synchronous_one(arguments: list[str], tmp_path: Path) -> None:
    common = [*arguments, "trainer.max_training_steps=3", "trainer.ckpt_interval=-1", "trainer.hf_save_interval=3"]
    main([*common, "trainer.fully_async.max_staleness_steps=0"])
    found = logged(tmp_path)
    main([*common, "trainer.fully_async.enabled=false", "trainer.run_name=synchronous"])
    expected = logged(tmp_path, "synchronous")
    for step, expected_step in zip(found, expected, strict=True):
        names = [name for name in expected_step if not name.startswith(("timing/", "trainer/tokens_per_second"))]
        expected_values = {name: expected_step[name] for name in names}
        assert {name: step[name] for name in names} == pytest.approx(expected_values, rel=1e-5, abs=1e-5)
    assert {step["async/staleness_max"] for step in found[1:]} == {0}


def test_a_stop_request_does_not_wait_for_the_rollouts_of_later_steps(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped while the sync waits for rollouts that never end."""
    monkeypatch.setattr("skyrl_train.trainer.STOP_GRACE_S", 0.5)

    class Stuck(SkyRLGymGenerator):
        async def rollout(self, requests: Any, sampling: Any, metadata: Any) -> Any:
            if metadata.training_phase == "train" and requests[0].id.draw >= 4:
                run.stop_soon()
                await asyncio.Event().wait()
            return await super().rollout(requests, sampling, metadata)

    class Run(BasePPOExp):
        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> SkyRLGymGenerator:
            return Stuck(cfg.generator, cfg.environment.skyrl_gym, inference_engine_client, tokenizer)

        def stop_soon(self) -> None:
            asyncio.get_running_loop().call_later(3, os.kill, os.getpid(), signal.SIGINT)

    run = Run(parse_cli([*arguments, "trainer.fully_async.in_flight_weight_updates=false"]))
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert [step["step"] for step in logged(tmp_path)] == [0, 1]
    assert (tmp_path / "skyrl/test_run/ckpts/global_step_1").is_dir()


def test_a_reward_function_of_batches_is_refused_before_models_load(
    arguments: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    register_reward_function("compare", level="batch")(lambda samples: [0.0] * len(samples))
    try:
        with pytest.raises(ConfigError, match=r"generator\.reward_functions=compare compares the samples of a batch"):
            BasePPOExp(parse_cli([*arguments, "generator.reward_functions=[compare]"])).run()
        assert "Loaded the policy" not in caplog.text
    finally:
        del REWARD_FUNCTIONS["compare"]


class Script(BasePPOExp):
    """A script of SkyRL."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> FullyAsyncRayPPOTrainer:
        return FullyAsyncRayPPOTrainer(*args, **kwargs)


def test_a_script_of_skyrl_trains_an_adapter_and_waits_for_rollouts_before_each_sync(
    arguments: list[str], tmp_path: Path
) -> None:
    overrides = ["trainer.fully_async.in_flight_weight_updates=false", "trainer.policy.model.lora.rank=4"]
    Script(parse_cli([*arguments, *overrides])).run()
    assert_run_is_right(tmp_path, n_checked=N_STEPS + 1)
    dumped = (tmp_path / "skyrl/test_run/trajectories/global_step_4.jsonl").read_text().splitlines()
    assert {len(json.loads(line)["weight_versions"]) for line in dumped} == {1}


def test_a_script_of_skyrl_in_one_process_is_refused(catch_run: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"set trainer\.fully_async\.enabled=true"):
        Script(parse_cli(catch_run)).run()
