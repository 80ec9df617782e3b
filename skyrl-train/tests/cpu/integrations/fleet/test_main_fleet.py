import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_kit.fleet.tasks import OPENENV, fleet_entries, write_dataset, write_tasks
from train_kit.models import set_context_length
from train_kit.processes import python
from train_kit.runs import Run, small_run
from train_kit.vision_models import save_vision_model

from integrations.fleet.entrypoints.main_fleet import main, read_config
from integrations.fleet.env import FleetSettings
from skyrl_train.errors import ConfigError

N_STEPS = 3


@pytest.fixture
def fleet_run(fleet_model: Path, tmp_path: Path, openenv: Any) -> list[str]:
    """Overrides for a run of three steps on two environments, with evaluations of a held-out one."""
    tasks = write_dataset(tmp_path, {"github": (6, 0), "booking": (6, 0), "outlook": (2, 0)})
    return small_run(
        tmp_path,
        f"trainer.max_training_steps={N_STEPS}",
        f"trainer.eval_interval={N_STEPS}",
        "trainer.eval_before_train=false",
        "trainer.dump_trajectories=true",
        "trainer.max_prompt_length=8000",
        "generator.n_samples_per_prompt=4",
        "generator.max_turns=3",
        "generator.sampling_params.max_generate_length=12",
        "generator.eval_sampling_params.max_generate_length=12",
        f"environment.skyrl_gym.fleet_task.tasks_file='{tasks}'",
        "environment.skyrl_gym.fleet_task.provisioning_wait_s=0.01",
        model=fleet_model,
        data=tmp_path / "data/train.parquet",
        val_data=tmp_path / "data/validation.parquet",
    )


def test_a_run_in_which_a_fifth_of_all_services_fail(
    fleet_run: list[str], tmp_path: Path, openenv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_STAND_IN_FAULTS", "0.2")
    main(fleet_run)
    run = Run(tmp_path / "fleet-task-grpo/test_run")
    steps = [row for row in run.metrics if row["step"] > 0]
    assert run.steps[-1] == N_STEPS
    trajectories = [row for step in range(1, N_STEPS + 1) for row in run.trajectories(step)]
    assert len(trajectories) == N_STEPS * 16
    invalid = [row for row in trajectories if row["error"]]
    assert 0 < len(invalid) < 16
    assert {row["stop_reason"] for row in invalid} <= {"reward_unknown", "env_error"}
    assert all(row["score"] is None for row in invalid)
    assert {row["total_reward"] for row in trajectories if not row["error"]} == {0.5, 1.0}  # no grade is lost
    assert max(row["policy/grad_norm"] for row in steps) > 0
    assert sum(row["rollouts/invalid"] for row in steps) == len(invalid)
    assert steps[-1]["environment/fleet_task/avg_provisioning_attempts"] >= 1
    assert {name for row in steps for name in row} >= {
        *(f"reward/{env}/{name}" for env in ("github", "booking") for name in ("variance_per_prompt", "signal_ratio")),
        *(f"reward/{env}/{name}" for env in ("github", "booking") for name in ("pass_at_4", "mean_positive_reward")),
        "environment/fleet_task/github/tool_error_rate",
        "environment/fleet_task/total_episodes",
        "rollout/github/env_init_failed",
        "eval/outlook/avg_score",
    }
    assert all(env.is_closed for env in openenv.created)
    assert all(env.n_verified <= 1 for env in openenv.created)


@pytest.fixture
def computer_run(fleet_run: list[str], tmp_path: Path) -> list[str]:
    """Overrides for a run of one step on tasks of computer use."""
    write_dataset(tmp_path, {"amazon": (0, 6), "instacart": (0, 2)}, "computer_use")
    return [*fleet_run, "trainer.max_training_steps=1", "trainer.eval_interval=-1"]


def test_a_vision_language_model_sees_screenshots(computer_run: list[str], tmp_path: Path) -> None:
    model = set_context_length(save_vision_model(tmp_path / "vision", "idefics3"), 8192)
    separate = ["environment.skyrl_gym.isolation=process", f"environment.skyrl_gym.python={python()}"]
    main([*computer_run, *separate, f"trainer.policy.model.path='{model}'"])
    run = Run(tmp_path / "fleet-task-grpo/test_run")
    assert run.metrics[-1]["rollouts/invalid"] == 0
    assert run.metrics[-1]["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    prompts = [json.dumps(row["input_prompt"]) for row in run.trajectories(1)]
    assert len(prompts) == 16
    assert all("The screenshot has 64 x 48 pixels." in prompt for prompt in prompts)


def test_a_text_model_refuses_screenshots_before_it_is_loaded(
    computer_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(computer_run)
    assert "has the modality computer_use, whose screenshots a text model cannot see" in capsys.readouterr().err
    assert not (tmp_path / "fleet-task-grpo/test_run/metrics.jsonl").exists()


def test_rollouts_that_the_trainer_ends_have_the_verifiers_grade(fleet_run: list[str], tmp_path: Path) -> None:
    main([*fleet_run, "generator.max_response_length=14", "generator.max_turns=50", "trainer.max_training_steps=1"])
    trajectories = Run(tmp_path / "fleet-task-grpo/test_run").trajectories(1)
    assert {row["stop_reason"] for row in trajectories} == {"length"}
    assert {row["total_reward"] for row in trajectories} == {0.5, 1.0}


def test_environments_in_another_interpreter(fleet_run: list[str], tmp_path: Path) -> None:
    separate = ["environment.skyrl_gym.isolation=process", f"environment.skyrl_gym.python={python()}"]
    main([*fleet_run, *separate, "trainer.max_training_steps=1", "trainer.eval_interval=-1"])
    trajectories = Run(tmp_path / "fleet-task-grpo/test_run").trajectories(1)
    assert [row["error"] for row in trajectories] == [None] * 16
    assert {row["total_reward"] for row in trajectories} <= {0.5, 1.0}


@pytest.mark.parametrize("separate", [[], ["isolation=process", f"python={sys.executable}"]])
def test_without_openenv_nothing_is_trained(
    separate: list[str],
    fleet_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(OPENENV)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit):
        main([*fleet_run, *(f"environment.skyrl_gym.{setting}" for setting in separate)])
    error = capsys.readouterr().err
    assert f"{sys.executable} cannot import envs.fleet_env.task_env" in error
    assert "integrations/fleet/requirements.txt" in error
    assert not (tmp_path / "fleet-task-grpo/test_run/metrics.jsonl").exists()


def test_no_rollout_outlives_its_software() -> None:
    limit, ttl = "generator.trajectory_timeout_seconds", "environment.skyrl_gym.fleet_task.ttl_seconds"
    assert read_config([]).generator.trajectory_timeout_seconds == FleetSettings().ttl_seconds
    assert read_config([f"{ttl}=60"]).generator.trajectory_timeout_seconds == 60
    assert read_config([f"{limit}=50", f"{ttl}=60"]).generator.trajectory_timeout_seconds == 50
    with pytest.raises(ConfigError, match=r"=60.5 is longer than the 60 s .* set .*ttl_seconds=61, or"):
        read_config([f"{limit}=60.5", f"{ttl}=60"])
    with pytest.raises(ConfigError, match="did you mean ttl_seconds"):
        read_config(["environment.skyrl_gym.fleet_task.ttl_second=60"])


def test_skyrl_doctor_knows_the_environment(fleet_run: list[str]) -> None:
    command = [python(), "-m", "integrations.fleet", "doctor", *fleet_run]
    without = [path for path in sys.path if path != str(OPENENV)]
    for paths, text in (
        ([str(OPENENV), *without], "ok       data          every row fits its environment"),
        (without, f"failed   data          row 0 of {fleet_run[0].split(chr(39))[1]}"),
    ):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert text in done.stdout, done.stdout + done.stderr
        assert ("cannot import envs.fleet_env.task_env" in done.stdout) == (paths == without)


def test_a_missing_task_is_refused_before_the_run(
    fleet_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path / "tasks.json", fleet_entries({"github": (1, 0)}))
    with pytest.raises(SystemExit):
        main(fleet_run)
    assert "prepare the dataset from the same file" in capsys.readouterr().err
