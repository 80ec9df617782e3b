from pathlib import Path

import pytest
from agent_kit.runs import write_run, write_task
from train_kit.runs import Run
from train_kit.tinker import serving_tinker

from skyrl_agent.integrations.tinker.agents import AgentTinkerOptions, AgentTinkerRun, main
from skyrl_agent.integrations.tinker.options import parse_options
from skyrl_train.errors import ConfigError

BACKEND = {"infer_backend": "tinker", "backend_config": {"model_max_len": 1500}}


def arguments(tmp_path: Path, **settings: object) -> list[str]:
    write_run(tmp_path)
    task = write_task(tmp_path, **{**BACKEND, "sampling_params": {"max_tokens": 8}, **settings})
    data = str(tmp_path / "train.jsonl")
    return [
        *("--task", str(task), "--train_data", data, "--eval_data", data, "--model_name", str(tmp_path / "model")),
        *("--batch_size", "2", "--max_steps", "2"),
        *("--output_dir", str(tmp_path), "--logger", "jsonl"),
    ]


def test_a_run_trains_on_trajectories_of_the_agent(tmp_path: Path) -> None:
    argv = arguments(tmp_path)
    with serving_tinker(tmp_path / "state", tmp_path / "model"):
        main(argv)
    run = Run(tmp_path / "skyrl-agent/agent_tinker")
    steps = [row for row in run.metrics if "avg_turn_assistant" in row and "time/train" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["avg_turn_assistant"] == 2.0 for row in steps)


def test_the_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m skyrl_agent.integrations.tinker [-h]")


def test_options_come_from_the_task_file(tmp_path: Path) -> None:
    options = parse_options(AgentTinkerOptions, arguments(tmp_path), "Train.")
    assert (options.n_samples_per_prompt, options.max_turns, options.max_generate_length) == (2, 2, 8)
    assert (options.max_input_length, options.max_sequence_length) == (1492, 1500)
    cfg = AgentTinkerRun(options).cfg
    assert cfg.generator.eval_n_samples_per_prompt == 3
    assert cfg.generator.eval_sampling_params.temperature == 0.5
    with pytest.raises(SystemExit):
        parse_options(AgentTinkerOptions, [*arguments(tmp_path), "--max_turns", "9"], "Train.")
    argv = arguments(tmp_path, infer_backend="skyrl-train", backend_config=None)
    with pytest.raises(ConfigError, match=r"generator.infer_backend=skyrl-train must be tinker"):
        parse_options(AgentTinkerOptions, argv, "Train.")
