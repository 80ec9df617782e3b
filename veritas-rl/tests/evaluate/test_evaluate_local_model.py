import json
from pathlib import Path

import pytest
from veritas_kit.endpoints import ServedModel
from veritas_kit.logs import assert_logged

from data_processing.jobs import read_records
from evaluate import evaluate_local_model
from skyrl_gym.tasks import task_family
from skyrl_gym.tasks.logic.family import FIRST_NUMBER, SEEDS_PER_TYPE


def evaluate(model: ServedModel, output: Path, *flags: str) -> int:
    return evaluate_local_model.main([*model.flags, "--output", str(output), *flags])


def test_a_served_model_is_evaluated_and_resumed(
    served_model: ServedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = task_family("lgc-v2")
    ids = [FIRST_NUMBER["operation"] * SEEDS_PER_TYPE + i for i in range(6)]
    tasks = [family.generate(i) for i in ids]
    solved = {task.prompt: family.solve(task) for task in tasks[:3]}
    broken = [tasks[5].prompt]
    served_model.reply = lambda prompt: 503 if prompt in broken else solved.get(prompt, "?")
    output, id_range = tmp_path / "rollouts.jsonl", ["--task-id-range", str(ids[0]), str(ids[-1])]
    assert evaluate(served_model, output, *id_range) == 1
    assert json.loads(output.with_suffix(".summary.json").read_text())["average_score"] == 3 / 5  # not 3 / 6
    broken.clear()
    assert evaluate(served_model, output, *id_range) == 0
    summary = json.loads(output.with_suffix(".summary.json").read_text())
    assert (summary["total_samples"], summary["failed"], summary["average_score"]) == (6, 0, 0.5)
    assert len(served_model.requests) == 7
    assert evaluate(served_model, output, *id_range, "--temperature", "1", "--samples", "2") == 0
    assert len(served_model.requests) == 19, "other settings are other replies"
    assert "operation" in capsys.readouterr().out


def test_without_ids_validation_tasks_are_played(served_model: ServedModel, tmp_path: Path) -> None:
    output = tmp_path / "rollouts.jsonl"
    output.write_text('{"note": "a record without a key is not a rollout"}\n')
    sudoku = ["--adapter-config", '{"task_types": ["sudoku"]}', "--num-tasks", "3"]
    assert evaluate(served_model, output, *sudoku) == 0
    family = task_family("lgc-v2")
    assert {family.split_of(record["task_id"]) for record in read_records(output)[1:]} == {"validation"}


def test_an_evaluation_is_logged_to_wandb(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    flags = ["--num-tasks", "2", "--wandb-project", "bench"]
    assert evaluate(served_model, tmp_path / "r.jsonl", *flags) == 1
    assert not served_model.requests, "the login is checked first"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert evaluate(served_model, tmp_path / "r.jsonl", *flags) == 0
    assert_logged(tmp_path, b"lgc-v2/avg_score")
