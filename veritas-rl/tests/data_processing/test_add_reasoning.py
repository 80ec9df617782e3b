import shutil
from pathlib import Path

import pytest
from veritas_kit.endpoints import ServedModel

from data_processing import add_reasoning, evaluate_dataset
from data_processing.jobs import read_records


def reason(path: Path, model: ServedModel, *flags: str) -> int:
    return add_reasoning.main(["--input", str(path), *model.flags, *flags])


def test_reasoning_is_added_and_resumed(
    generated: Path, served_model: ServedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL_KEY", "secret")
    statuses = [503]
    served_model.reply = lambda prompt: (
        statuses.pop() if statuses else "<think>hm</think>```\nfirst\n```\nthen \\boxed{0}"
    )
    flags = ["--api-key-env", "MODEL_KEY", "--max-concurrent", "1", "--max-tokens", "99"]
    assert reason(generated, served_model, *flags) == 1
    assert "7 explanations written, 0 existed, 1 failed" in capsys.readouterr().out
    request = served_model.requests[0]
    assert (request.path, request.headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert request.body | {"model": "tiny", "temperature": 0.3, "max_tokens": 99} == request.body
    assert reason(generated, served_model, *flags) == 0
    assert "1 explanations written, 7 existed, 0 failed" in capsys.readouterr().out
    assert len(served_model.requests) == 9
    reasoned = generated.parents[1] / "reasoned/tasks.jsonl"
    assert evaluate_dataset.main(["--input", str(reasoned)]) == 0
    assert all(record["answer"].startswith("```\nfirst") for record in read_records(reasoned))


def test_explanations_are_beside_an_input_in_any_other_folder(
    generated: Path, served_model: ServedModel, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    copy = shutil.copy(generated, tmp_path / "mine")
    assert reason(Path(copy), served_model) == 0
    assert (tmp_path / "mine/reasoned/tasks.jsonl").is_file()


def test_failures_and_empty_explanations_end_the_job(
    generated: Path, served_model: ServedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    served_model.reply = lambda prompt: 401
    assert reason(generated, served_model) == 1
    error = capsys.readouterr().err
    assert "of 8 records failed, more than 10%" in error
    assert "status 401" in error
    served_model.reply = lambda prompt: "<think>too long"
    assert reason(generated, served_model) == 1
    assert "gave no explanation" in capsys.readouterr().err
