from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from train_kit.fleet.tasks import fleet_entries, write_dataset, write_tasks
from train_kit.runs import Run, small_run

from integrations.fleet.entrypoints.main_fleet import main

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


def test_rollouts_that_the_trainer_ends_have_the_verifiers_grade(fleet_run: list[str], tmp_path: Path) -> None:
    main([*fleet_run, "generator.max_response_length=14", "generator.max_turns=50", "trainer.max_training_steps=1"])
    trajectories = Run(tmp_path / "fleet-task-grpo/test_run").trajectories(1)
    assert {row["stop_reason"] for row in trajectories} == {"length"}
    assert {row["total_reward"] for row in trajectories} == {0.5, 1.0}


def test_a_missing_task_is_refused_before_the_run(
    fleet_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path / "tasks.json", fleet_entries({"github": (1, 0)}))
    with pytest.raises(SystemExit):
        main(fleet_run)
    assert "prepare the dataset from the same file" in capsys.readouterr().err
