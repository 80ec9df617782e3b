"""The data tools as commands, against a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from wandb_logs import assert_logged

from data_processing import add_reasoning, convert_to_parquet, evaluate_dataset, generate_dataset
from data_processing.jobs import ToolError, read_records, work
from evaluate import evaluate_local_model
from skyrl_gym.tasks import compute_score, task_family
from skyrl_gym.tasks.logic.family import FIRST_NUMBER, SEEDS_PER_TYPE


class Model(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint that answers with `replies(prompt)`; a number is the status of an error."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: Any = lambda prompt: "Because it is so."
        self.prompts: list[str] = []
        self.requests: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Model

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = request["messages"][-1]["content"]
        self.server.prompts.append(prompt)
        self.server.requests.append({**request, "path": self.path, "key": self.headers.get("Authorization")})
        reply = self.server.replies(prompt)
        is_error = isinstance(reply, int)
        body = json.dumps({"error": "no"} if is_error else {"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(reply if is_error else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def model() -> Iterator[Model]:
    with Model() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    path = tmp_path / "lgc-v2/generated/tasks.jsonl"
    assert generate(path, 8) == 0
    return path


def generate(path: Path, n: int, *more: str) -> int:
    return generate_dataset.main(["--env", "lgc-v2", "--num-samples", str(n), "--output", str(path), *more])


def reason(path: Path, model: Model, *more: str) -> int:
    flags = ["--base-url", model.url, "--model", "tiny", "--max-retries", "0"]
    return add_reasoning.main(["--input", str(path), *flags, *more])


def test_generated_answers_are_verified(generated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_dataset.main(["--input", str(generated)]) == 0
    summary = json.loads((generated.parents[1] / "results/tasks.json").read_text())
    assert (summary["total_samples"], summary["accuracy"], summary["error_count"]) == (8, 1, 0)
    assert len(summary["task_type_accuracy"]) == 8
    records = read_records(generated)
    records[0]["answer"], records[1]["extra_info"]["fingerprint"] = "nonsense", "0"
    generated.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert evaluate_dataset.main(["--input", str(generated), "--verbose"]) == 1
    assert "6 of 8 right, 1 errors" in capsys.readouterr().out


def test_generation_resumes_after_a_kill(generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = sorted(generated.read_text().split("\n"))
    text = generated.read_text()
    generated.write_text(text[: len(text) - 40])  # the last line is cut off
    assert generate(generated, 8) == 0
    assert "1 tasks written, 7 existed" in capsys.readouterr().out
    assert sorted(generated.read_text().split("\n")) == whole
    assert generate(generated, 10) == 0
    assert len(read_records(generated)) == 10
    assert generate(tmp_path / "other.jsonl", 10, "--concurrency", "1") == 0
    assert sorted(generated.read_text().split("\n")) == sorted((tmp_path / "other.jsonl").read_text().split("\n"))


def test_a_line_that_is_cut_inside_a_character_is_removed(tmp_path: Path) -> None:
    output, records = tmp_path / "out.jsonl", [{"key": key, "text": "é"} for key in range(3)]
    assert work(records, dict, output, n_total=3).n_written == 3
    content = output.read_bytes()
    output.write_bytes(content[: content.rindex("é".encode()) + 1])
    summary = work(records, dict, output, n_total=3)
    assert (summary.n_written, summary.n_skipped) == (1, 2)
    assert sorted(read_records(output), key=lambda record: record["key"]) == records


def test_results_are_beside_an_input_in_any_other_folder(generated: Path, model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "tasks.jsonl").write_text(generated.read_text())
    assert evaluate_dataset.main(["--input", str(folder / "tasks.jsonl")]) == 0
    assert reason(folder / "tasks.jsonl", model) == 0
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*/*") if path.is_file()) == [
        Path("lgc-v2/generated/tasks.jsonl"),
        Path("mine/reasoned/tasks.jsonl"),
        Path("mine/results/tasks.json"),
        Path("mine/tasks.jsonl"),
    ]


def test_splits_and_options_are_other_tasks(generated: Path) -> None:
    assert generate(generated, 8, "--split", "validation") == 0
    assert generate(generated, 8, "--task-types", "operation") == 0
    records = read_records(generated)
    assert len(records) == len({record["key"] for record in records}) == 24
    ids = [{r["task_id"] for r in records if r["extra_info"]["split"] == split} for split in ("train", "validation")]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env", "lgc-v3", "--num-samples", "2"], "env='lgc-v3' is not a task family"),
        (["--env", "trace", "--num-samples", "2", "--adapter-config", '{"a": 1}'], "no option 'a'"),
        (["--env", "lgc-v2", "--num-samples", "2", "--task-types", "chess"], "task_types='chess'"),
        (
            ["--env", "swe-synth", "--num-samples", "9", "--adapter-config", '{"task_ids": [0]}'],
            "go beyond the 1 train",
        ),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_dataset.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_a_required_flag_has_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    for tool, default in ((evaluate_local_model, None), (add_reasoning, "gpt-4o-mini")):
        with pytest.raises(SystemExit):
            tool.main(["--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert (f"the model's name at the endpoint (default: {default})" in text) == (default is not None)


@pytest.mark.parametrize("arguments", [["--num-samples", "0"], ["--num-samples", "1", "--adapter-config", "[1]"]])
def test_flags_are_checked(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        generate_dataset.main(["--env", "trace", *arguments])
    assert exit_status.value.code == 2


def test_reasoning_is_added_and_resumed(
    generated: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL_KEY", "secret")
    failing = {"first"}
    model.replies = lambda prompt: (
        503 if failing and failing.pop() else "<think>hm</think>```\nfirst\n```\nthen \\boxed{0}"
    )
    flags = ["--api-key-env", "MODEL_KEY", "--max-concurrent", "1", "--max-tokens", "99"]
    assert reason(generated, model, *flags) == 1
    assert "7 explanations written, 0 existed, 1 failed" in capsys.readouterr().out
    request = model.requests[0]
    assert (request["path"], request["key"]) == ("/v1/chat/completions", "Bearer secret")
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("tiny", 0.3, 99)
    assert reason(generated, model, *flags) == 0
    assert "1 explanations written, 7 existed, 0 failed" in capsys.readouterr().out
    assert len(model.prompts) == 9
    reasoned = generated.parents[1] / "reasoned/tasks.jsonl"
    assert evaluate_dataset.main(["--input", str(reasoned)]) == 0
    assert all(record["answer"].startswith("```\nfirst") for record in read_records(reasoned))


def test_a_model_that_always_fails_ends_the_job(
    generated: Path, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    model.replies = lambda prompt: 401
    assert reason(generated, model) == 1
    error = capsys.readouterr().err
    assert "of 8 records failed, more than 10%" in error
    assert "status 401" in error
    assert reason(generated.with_name("no.jsonl"), model) == 1
    assert "does not exist" in capsys.readouterr().err


def test_an_empty_explanation_is_not_kept(generated: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    model.replies = lambda prompt: "<think>too long"
    assert reason(generated, model) == 1
    assert "gave no explanation" in capsys.readouterr().err


def test_parquet_for_sft_and_rl(generated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parquet"
    arguments = ["--input", str(generated), "--out-dir", str(folder), "--val-ratio", "0.25", "--shuffle"]
    assert convert_to_parquet.main([*arguments, "--format", "sft"]) == 0
    train, val = (pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    assert (len(train), len(val)) == (6, 2)
    records = {record["prompt"]: record for record in read_records(generated)}
    assert all(row["response"] == records[row["prompt"]]["answer"] for row in train + val)
    assert convert_to_parquet.main([*arguments, "--format", "rl"]) == 0
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == [row["prompt"] for row in train]
    for row in rows:
        record = records[row["prompt"][0]["content"]]
        truth = row["reward_model"]["ground_truth"]
        assert compute_score(row["data_source"], record["answer"], truth, row["extra_info"]) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--response-field", "reply", "--format", "sft"], "has no text in reply"),
        (["--prompt-field", "question"], "--prompt-field"),
        (["--val-ratio", "1"], "leave no training row"),
    ],
)
def test_fields_that_are_missing_are_named(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert convert_to_parquet.main(["--input", str(generated), "--out-dir", str(tmp_path), *flags]) == 1
    assert words in capsys.readouterr().err


def test_a_served_model_is_evaluated_and_resumed(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = task_family("lgc-v2")
    ids = [FIRST_NUMBER["operation"] * SEEDS_PER_TYPE + i for i in range(6)]
    answers = {family.generate(i).prompt: family.solve(family.generate(i)) for i in ids}
    broken = [family.generate(ids[5]).prompt]
    model.replies = lambda prompt: 503 if prompt in broken else answers[prompt] if prompt in list(answers)[:3] else "?"
    output = tmp_path / "rollouts.jsonl"
    arguments = ["--base-url", model.url, "--model", "tiny", "--max-retries", "0", "--output", str(output)]
    arguments += ["--task-id-range", str(ids[0]), str(ids[-1])]
    assert evaluate_local_model.main(arguments) == 1
    assert json.loads(output.with_suffix(".summary.json").read_text())["average_score"] == 3 / 5  # not 3 / 6
    broken.clear()
    assert evaluate_local_model.main(arguments) == 0
    summary = json.loads(output.with_suffix(".summary.json").read_text())
    assert (summary["total_samples"], summary["failed"], summary["average_score"]) == (6, 0, 0.5)
    assert len(model.prompts) == 7
    assert evaluate_local_model.main([*arguments, "--temperature", "1", "--samples", "2"]) == 0
    assert len(model.prompts) == 19  # other settings are other replies
    assert "operation" in capsys.readouterr().out


def test_without_ids_validation_tasks_are_played(model: Model, tmp_path: Path) -> None:
    output = tmp_path / "rollouts.jsonl"
    output.write_text('{"note": "a record without a key is not a rollout"}\n')
    flags = ["--base-url", model.url, "--model", "tiny", "--num-tasks", "3", "--output", str(output)]
    config = ["--adapter-config", '{"task_types": ["sudoku"]}']
    assert evaluate_local_model.main([*flags, *config]) == 0
    family = task_family("lgc-v2")
    assert {family.split_of(record["task_id"]) for record in read_records(output)[1:]} == {"validation"}


def test_an_evaluation_is_logged_to_wandb(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    flags = ["--base-url", model.url, "--model", "tiny", "--num-tasks", "2", "--output", str(tmp_path / "r.jsonl")]
    assert evaluate_local_model.main([*flags, "--wandb-project", "bench"]) == 1
    assert not model.prompts, "the login is checked first"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert evaluate_local_model.main([*flags, "--wandb-project", "bench"]) == 0
    assert_logged(tmp_path, b"lgc-v2/avg_score")


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    def other(record: dict[str, Any]) -> dict[str, Any]:
        with pytest.raises(ToolError, match="another process writes"):
            work([{"key": 2}], dict, output, n_total=1)
        return record

    assert work([{"key": 1}], other, output, n_total=1).n_written == 1
    assert read_records(output) == [{"key": 1}]
