import json
from pathlib import Path
from typing import Any

import pytest
from train_kit import golden

from skyrl_report.cli import main
from skyrl_report.episodes import classify, read_episodes
from skyrl_report.remote import RemoteFolder

GOLDEN = Path(__file__).parent / "golden"
CALL = '<tool_call>{"name": "get", "arguments": {"id": 3}}</tool_call>'


def chat(*texts: str) -> str:
    """Return a response in ChatML: replies and results of tools in turn."""
    roles = ["user", "assistant"]
    parts = [f"<|im_start|>{roles[i % 2]}\n{text}<|im_end|>\n" for i, text in enumerate(texts[1:])]
    return f"{texts[0]}<|im_end|>\n" + "".join(parts)


def row(response: str, score: list[float] | None, **fields: Any) -> dict[str, Any]:
    """Return a row as SkyRL writes it."""
    return {
        "input_prompt": "<|im_start|>user\nBook a flight<|im_end|>\n<|im_start|>assistant\n",
        "output_response": response,
        "score": score,
        "stop_reason": "stop",
        "env_class": "fleet_task",
        "env_extras": {"task_key": "task_1", "data_source": "booking"},
        "data_source": "booking",
    } | fields


@pytest.fixture
def evals(tmp_path: Path) -> Any:
    """Return a function that writes an evaluation."""

    def write(step: int, rows: list[dict[str, Any]]) -> RemoteFolder:
        folder = tmp_path / f"run/evals/global_step_{step}"
        folder.mkdir(parents=True)
        (folder / "booking.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (folder / "aggregated_results.jsonl").write_text('{"eval/all/avg_score": 0.5}\n')
        return RemoteFolder(str(tmp_path / "run/evals"))

    return write


def test_failures_are_classified_by_what_tools_and_model_said(evals: Any, pytestconfig: pytest.Config) -> None:
    """A case has replies and results of tools in turn, with a tool call as CALL, and other fields of a row."""
    printed = {}
    for step, case in enumerate(golden.read("failures", GOLDEN)):
        fields = json.loads(case.replace("CALL", json.dumps(CALL)[1:-1]))
        response = chat(*fields.pop("said"))
        (episode,) = read_episodes(evals(step, [row(response, **{"score": [0.0]} | fields)]), step)
        printed[case] = sorted(classify(episode))
    golden.compare("failures", printed, pytestconfig, GOLDEN)


def test_turns_and_tool_calls_are_counted_in_both_formats(evals: Any) -> None:
    llama = "<|eot_id|><|start_header_id|>{}<|end_header_id|>\n\n"
    responses = [
        chat(CALL + CALL, "Tool result: 1", "<done>"),
        CALL + llama.format("user") + "Tool result: 1" + llama.format("assistant") + "<done><|eot_id|>",
    ]
    episodes = read_episodes(evals(0, [row(response, [1.0]) for response in responses]), 0)
    assert [(episode.n_turns, episode.n_tool_calls) for episode in episodes] == [(2, 2), (2, 1)]
    counted = row(responses[0], [1.0], turns=[{}] * 5, env_metrics={"tool_calls": 9})
    (episode,) = read_episodes(evals(1, [counted]), 1)
    assert (episode.n_turns, episode.n_tool_calls) == (5, 9)


def test_the_page_compares_two_steps(evals: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing, passing = chat(CALL, "Error: 404 not found", "Sorry | done"), chat(CALL, "Tool result: ok", "<done>")
    evals(0, [row(failing, [0.0]), row(failing, [0.0]), row(passing, [1.0])])
    evals(20, [row(passing, None, stop_reason="env_error", error="crashed")])
    evals(40, [row(passing, [1.0]), row(passing, [0.5, 0.5]), row(failing, [0.0], env_extras={"task_key": "task_2"})])
    assert main(["trajectories", str(tmp_path / "run")]) == 0
    page = capsys.readouterr().out
    assert "| data source | step | episodes | invalid | turns | tool calls | tool errors | success | pass@3 |" in page
    assert "| booking | 0 | 3 | 0 | 2.0 | 1.0 | 0.7 | 33.3% | 100.0% |" in page
    assert "| booking | 40 | 3 | 0 | 2.0 | 1.0 | 0.3 | 66.7% | 50.0% |" in page
    assert "| resource not found | 2 | 1 |" in page
    assert '- **resource not found**, step 0, booking, task `task_1`: "Error: 404 not found"' in page
    assert main(["trajectories", f"file://{tmp_path}/run/evals", "--to", "20", "--samples", "0"]) == 0
    page = capsys.readouterr().out
    assert "| booking | 20 | 1 | 1 | – | – | – | – | – |" in page
    assert "| invalid: env_error | 0 | 1 | no reward: excluded from all rates |" in page
    assert "Samples" not in page


def test_evaluations_after_the_last_step_are_left_out(
    evals: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (0, 2, 4):
        evals(step, [row("a", [1.0])])
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0}\n{"step": 2}\n')
    assert main(["trajectories", str(tmp_path / "run")]) == 0
    assert "Evaluations at steps 0 and 2." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0}/nothing"], "has no evaluations (global_step_N/); train with trainer.eval_interval set"),
        (["{0}/run", "--to", "7"], "has no evaluation at step 7; choose from [0]"),
        (["nosuch://bucket/evals"], "cannot read nosuch://bucket/evals"),
        (["{0}/torn"], "booking.jsonl:1 is not JSON"),
    ],
)
def test_unreadable_evaluations_are_named(
    evals: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    evals(0, [row("a", [1.0])])
    (tmp_path / "torn/global_step_0").mkdir(parents=True)
    (tmp_path / "torn/global_step_0/booking.jsonl").write_text("{torn")
    assert main(["trajectories", *(argument.format(tmp_path) for argument in arguments)]) == 1
    assert message in capsys.readouterr().err
