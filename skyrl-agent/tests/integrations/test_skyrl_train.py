import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from agent_kit.runs import write_run, write_task
from click.testing import Result
from typer.testing import CliRunner

from skyrl_agent.cli import app
from skyrl_agent.integrations.skyrl_train import parse_task
from skyrl_train.errors import ConfigError
from skyrl_train.generators.rewards import REWARD_FUNCTIONS, RewardSample, register_reward_function


def test_the_trainer_takes_its_settings_from_the_task_file(tmp_path: Path) -> None:
    _, cfg = parse_task(write_task(tmp_path), ["trainer.epochs=3", "generator.sampling_params.temperature=0.7"])
    generator = cfg.generator
    assert (generator.n_samples_per_prompt, generator.eval_n_samples_per_prompt) == (2, 3)
    assert (generator.max_turns, generator.max_response_length) == (2, 400)
    assert generator.sampling_params.stop == ["it's", "\\n", "\\'x\\"]
    assert (generator.sampling_params.temperature, generator.eval_sampling_params.temperature) == (0.7, 0.5)
    path = write_task(tmp_path, infer_backend="tinker", backend_config={"model_max_len": 9})
    with pytest.raises(ConfigError, match=r"generator.infer_backend=tinker must be skyrl-train for this command"):
        parse_task(path, [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generator.max_turns=5", r"generator.max_turns=5 has no effect on agents; set generator.max_iterations in "),
        ("generator.step_wise_trajectories=true", "has no effect on agents; remove it"),
        ("generator.trajectory_timeout_seconds=5", "set generator.trajectory_timeout in"),
        ("environment.skyrl_gym.max_env_workers=5", "has no effect on agents; remove it"),
        ("generator.max_trns=5", "max_turns"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_task(write_task(tmp_path), [override])


def skyrl(command: str, folder: Path, *more: str, data_source: str = "nq") -> Result:
    task, overrides = write_task(folder), write_run(folder, data_source)
    return CliRunner().invoke(app, [command, str(task), *overrides, *more])


def test_the_command_trains_and_evaluates(tmp_path: Path) -> None:
    result = skyrl("train", tmp_path)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "outputs" / "agents" / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["avg_turn_assistant"] == 2.0
        assert row["iter_cap_ratio"] == 1.0
        assert row["tool_calls_total"] == 0.0
    result = skyrl("generate", tmp_path, "trainer.run_name=evaluated")
    assert result.exit_code == 0, result.output
    assert "eval/all/avg_score" in result.output
    lines = (folder.with_name("evaluated") / "evals" / "eval_only" / "nq.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 3


def test_reward_functions_are_added(tmp_path: Path) -> None:
    @register_reward_function("agent_bonus")
    def bonus(samples: Sequence[RewardSample]) -> list[float]:
        return [0.25 for _ in samples]

    try:
        result = skyrl("generate", tmp_path, "generator.reward_functions=[agent_bonus]")
    finally:
        del REWARD_FUNCTIONS["agent_bonus"]
    assert result.exit_code == 0, result.output
    assert re.search(r"eval/all/avg_score +0\.25\b", result.output)


def test_a_dry_run_prints_the_plan_and_unusable_data_is_named(tmp_path: Path) -> None:
    result = skyrl("train", tmp_path, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "2 samples" in result.output or "2 × 2" in result.output
    assert not (tmp_path / "outputs").exists()
    missing = skyrl("train", tmp_path, f"data.train_data={tmp_path / 'none.jsonl'}")
    assert missing.exit_code == 1
    assert "none.jsonl" in missing.output + missing.stderr
    result = skyrl("train", tmp_path, data_source="boxes")
    assert result.exit_code == 1
    assert "GeneralReactTask rejects 4 of 4 rows; the first: row 0 of" in result.output + result.stderr
    assert "no grader is known for data_source='boxes'" in result.output + result.stderr
