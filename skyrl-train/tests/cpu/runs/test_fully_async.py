"""Asynchronous runs, with an engine in a separate process."""

import asyncio
import os
import signal
import subprocess
from collections import Counter
from typing import Any

import psutil
import pytest
from train_kit.processes import TRAIN_FOLDER, find_descendants, kill_descendant, python, wait_until
from train_kit.runs import AtStepEnd, Run, run_of, train, train_with

from skyrl_train.compat.skyrl.experiment import BasePPOExp
from skyrl_train.compat.skyrl.trainer import FullyAsyncRayPPOTrainer
from skyrl_train.config.cli import parse_cli
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.errors import ConfigError
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.generators.rewards import REWARD_FUNCTIONS, register_reward_function
from skyrl_train.trainer import Step, Trainer
from skyrl_train.types import TrainingBatch

pytestmark = pytest.mark.usefixtures("forked_processes")

N_STEPS = 4
STEPS_PER_EPOCH = 2
AFTER_ROLLOUTS = "trainer.fully_async.in_flight_weight_updates=false"
"""Each weight sync waits for the rollouts in progress."""


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


def assert_run_is_right(run: Run, n_checked: int = 1) -> None:
    """Assert that a run trained each prompt once per epoch, with bounded staleness, and compared log-probs.

    `n_checked` is the number of weight syncs after which the engine's log-probs were compared with the policy's.
    """
    assert run.steps == list(range(N_STEPS + 1))
    staleness = [step["async/staleness_max"] for step in run.metrics[1:]]
    assert set(staleness) <= {0, 1}
    assert max(staleness) == 1, "rollouts never ran ahead"
    gaps = [step["sync/logprob_gap"] for step in run.metrics if "sync/logprob_gap" in step]
    assert [gap < 1e-5 for gap in gaps] == [True] * n_checked
    assert all(step["sync/verified_copies"] == 1 for step in run.metrics)
    assert all(step["async/staleness_violation_count"] == 0 for step in run.metrics[1:])
    for first in range(1, N_STEPS + 1, STEPS_PER_EPOCH):
        trained = [row["uid"] for step in range(first, first + STEPS_PER_EPOCH) for row in run.trajectories(step)]
        assert set(Counter(trained).values()) == {1}, f"in the epoch of step {first}"


@pytest.mark.parametrize(("setting", "n_checked"), [([], 1), ([AFTER_ROLLOUTS], N_STEPS + 1)])
def test_an_engine_that_is_killed_is_replaced_and_no_prompt_is_lost(
    setting: list[str], n_checked: int, arguments: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    kill = AtStepEnd(lambda run, step: step == 2 and kill_descendant("spawn_main"))
    run = train_with(*arguments, *setting, first=[kill])
    assert "The engine was lost and is replaced" in caplog.text
    assert_run_is_right(run, n_checked)
    assert not list(find_descendants("spawn_main"))


PROGRAM = """
import multiprocessing, sys
from examples.catch.main_catch import main
multiprocessing.set_executable(sys.argv.pop(1))
main()
"""


def test_a_killed_run_ends_its_engine_and_resumes_with_the_prompts_in_progress(arguments: list[str]) -> None:
    run = run_of(arguments)
    command = [python(), "-c", PROGRAM, python(), *arguments]
    with subprocess.Popen(command, cwd=TRAIN_FOLDER, stderr=subprocess.DEVNULL) as process:
        wait_until((run.folder / "ckpts/global_step_2").exists)
        (engine,) = find_descendants("spawn_main")
        process.kill()
    _, running = psutil.wait_procs([engine], timeout=100)
    assert not running, "the engine outlived its run"
    assert_run_is_right(train(*arguments))


def test_without_staleness_a_run_trains_as_a_synchronous_one(arguments: list[str]) -> None:
    common = [*arguments, "trainer.max_training_steps=3", "trainer.ckpt_interval=-1"]
    found = train(*common, "trainer.fully_async.max_staleness_steps=0").reproducible_metrics
    expected = train(*common, "trainer.fully_async.enabled=false", "trainer.run_name=synchronous")
    for step, expected_step in zip(found, expected.reproducible_metrics, strict=True):
        assert {name: step[name] for name in expected_step} == pytest.approx(expected_step, rel=1e-5, abs=1e-5)
    assert {step["async/staleness_max"] for step in found[1:]} == {0}


def test_a_stop_request_does_not_wait_for_the_rollouts_of_later_steps(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped while the sync after step 1 waits for rollouts that never end."""
    monkeypatch.setattr("skyrl_train.trainer.STOP_GRACE_S", 0.5)

    class StuckGenerator(GymGenerator):
        async def rollout(self, requests: Any, sampling: Any, metadata: Any) -> Any:
            if metadata.training_phase == "train" and requests[0].id.draw >= 4:
                await asyncio.Event().wait()
            return await super().rollout(requests, sampling, metadata)

    class StoppedTrainer(Trainer):
        async def update(self, step: Step, batch: TrainingBatch) -> None:
            await super().update(step, batch)
            asyncio.get_running_loop().call_later(1, os.kill, os.getpid(), signal.SIGINT)

    class Experiment(RLExperiment):
        trainer_class = StoppedTrainer

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> GymGenerator:
            return StuckGenerator(cfg.generator, cfg.environment.skyrl_gym, inference_engine_client, tokenizer)

    with pytest.raises(KeyboardInterrupt):
        Experiment(parse_cli([*arguments, AFTER_ROLLOUTS])).run()
    run = run_of(arguments)
    assert run.steps == [0, 1]
    assert run.checkpoints.steps() == [1]


def test_a_reward_function_of_batches_is_refused_before_models_load(
    arguments: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    register_reward_function("compare", level="batch")(lambda samples: [0.0] * len(samples))
    try:
        with pytest.raises(ConfigError, match=r"generator\.reward_functions=compare compares the samples of a batch"):
            train_with(*arguments, "generator.reward_functions=[compare]")
        assert "Loaded the policy" not in caplog.text
    finally:
        del REWARD_FUNCTIONS["compare"]


class Script(BasePPOExp):
    """A script of SkyRL."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> FullyAsyncRayPPOTrainer:
        return FullyAsyncRayPPOTrainer(*args, **kwargs)


def test_a_script_of_skyrl_trains_an_adapter_and_waits_for_rollouts_before_each_sync(arguments: list[str]) -> None:
    Script(parse_cli([*arguments, AFTER_ROLLOUTS, "trainer.policy.model.lora.rank=4"])).run()
    run = run_of(arguments)
    assert_run_is_right(run, n_checked=N_STEPS + 1)
    assert {len(row["weight_versions"]) for row in run.trajectories(N_STEPS)} == {1}


def test_a_script_of_skyrl_in_one_process_is_refused(catch_run: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"set trainer\.fully_async\.enabled=true"):
        Script(parse_cli(catch_run)).run()
