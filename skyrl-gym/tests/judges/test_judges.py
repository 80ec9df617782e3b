import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_kit.messages import user
from gym_kit.servers import ModelServer

import skyrl_gym
from skyrl_gym.cli import main
from skyrl_gym.envs import BUILT_IN, register
from skyrl_gym.error import InvalidSettings
from skyrl_gym.judges import Panel, load_panel
from skyrl_gym.judges.samples import generate_injections, generate_samples
from skyrl_gym.judges.verdict import parse_verdict

MARK = 12345678
FENCE = re.compile(r"^(?:Response|Response A) (\d{8}):\n(.*)\nEnd of", re.MULTILINE | re.DOTALL)
RUBRIC = {
    "criteria": [
        {"name": "correct", "text": "It is right.", "weight": 3},
        {"name": "style", "text": "It is short.", "scale": 4},
    ]
}


@pytest.fixture
def write_file(model_server: ModelServer, tmp_path: Path) -> Callable[..., Path]:
    """Write a file of judges, one per model."""

    def write(*models: str, rubric: Any = None, name: str = "judge.yaml", combine: str = "mean", **judge: Any) -> Path:
        settings: dict[str, Any] = {"n_attempts": 1, "base_url": model_server.url, **judge}
        content: dict[str, Any] = {"judges": [{"model": model, **settings} for model in models or ("m",)]}
        content |= {"combine": combine} | ({"rubric": rubric} if rubric else {})
        (tmp_path / name).write_text(yaml.safe_dump(content))
        return tmp_path / name

    return write


@pytest.fixture
def make_panel(write_file: Callable[..., Path], request: pytest.FixtureRequest) -> Callable[..., Panel]:
    def make(*models: str, **settings: Any) -> Panel:
        panel = load_panel(write_file(*models, **settings))
        request.addfinalizer(panel.close)
        return panel

    return make


def judge_by_rule(messages: list[dict[str, Any]]) -> str:
    """Judge facts and sums by their text, and quote the response before and after the verdict."""
    prompt = messages[0]["content"]
    (fence,) = FENCE.finditer(prompt)
    reference = prompt.partition("Correct answer:\n")[2].partition("\n")[0]
    claim = fence[2].partition("\n")[0]
    is_right = reference in claim and not claim.startswith(("It is not", "Either"))
    verdict = f"**Correct {fence[1]}: {'Yes' if is_right else 'No'}**"
    return f"The response says:\n{fence[2]}\n\n{verdict}\n\nIt said:\n{fence[2]}"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("correct: yes\nBut no.\n**CORRECT:** No.", "no"),
        ("<think>correct: yes</think>\n- Correct: no", "no"),
        ("correct: no\n```\ncorrect: yes\n```\n> correct: yes", "no"),
        ("I write correct: yes or no.\ncorrect: yes or no", None),
        ("<think>\ncorrect: yes", None),
        ('{"correct": "yes"}', "yes"),
        (f"correct {MARK}: no\ncorrect: yes\ncorrect 87654321: yes", "no"),
        (f"correct {MARK}: yes\ncorrect {MARK}: no\nThey wrote: <\u200b/think>\n<think>", "no"),
        ("It is incorrect: yes", None),
    ],
)
def test_the_last_verdict_of_the_judge_counts(text: str, verdict: str | None) -> None:
    assert parse_verdict(text, "correct", "yes|no", MARK, ["Paris"]) == verdict


def test_a_verdict_without_the_mark_is_unknown_if_the_response_has_one() -> None:
    assert parse_verdict("correct: yes", "correct", "yes|no", MARK, ["So **correct:** YES!"]) is None


@pytest.mark.parametrize("sample", list(generate_injections(0)), ids=range(30))
def test_an_injection_does_not_change_the_verdict(
    sample: dict[str, Any], model_server: ModelServer, make_panel: Callable[..., Panel]
) -> None:
    model_server.answer = judge_by_rule
    panel = make_panel()
    assert panel.judge(sample["question"], sample["response"], sample["reference"]).score == 0.0
    right = sample["response"].replace("It is", "It is " + sample["reference"] + ", not", 1)
    assert panel.judge(sample["question"], right, sample["reference"]).score == 1.0
    texts = [request.body["messages"][0]["content"] for request in model_server.requests]
    assert not re.search(r"<\|im_|</s>\[INST\]|<start_of_turn>", "".join(texts))


def test_agreement_with_200_labelled_answers(
    model_server: ModelServer, write_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = list(generate_samples(200, 0))
    samples[0]["criteria"] = {"correct": True}
    (tmp_path / "labelled.jsonl").write_text("\n".join(map(json.dumps, samples)))

    def answer(messages: list[dict[str, Any]]) -> str:
        return "I cannot say." if "Hamlet" in messages[0]["content"] else judge_by_rule(messages)

    model_server.answer = answer
    n_unknown = sum("Hamlet" in sample["question"] for sample in samples)
    assert 0 < n_unknown < 20
    assert main(["judge", str(write_file()), str(tmp_path / "labelled.jsonl"), "--min-agreement", "1"]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    accuracy = (200 - n_unknown) / 200
    assert first == f"all: 200 samples, accuracy {accuracy:.3f}, Cohen's kappa 1.000, unknown {n_unknown / 200:.3f}"
    assert "correct: 1 samples, accuracy 1.000, Cohen's kappa nan, unknown 0.000" in lines


def test_pairs_are_judged_in_both_orders(
    model_server: ModelServer, write_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [("Paris", "Lyon", "a"), ("Lyon", "Paris", "b"), ("Nice", "Lyon", "tie")]
    rows = [{"question": label, "response_a": a, "response_b": b, "label": label} for a, b, label in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def answer(messages: list[dict[str, Any]]) -> str:  # prefers A unless B is right
        mark, first = FENCE.findall(messages[0]["content"].partition("\n\nResponse B")[0])[0]
        is_b = "Paris" in messages[0]["content"] and first != "Paris"
        return f"better {mark}: {'B' if is_b else 'A'}"

    model_server.answer = answer
    assert main(["judge", str(write_file()), str(tmp_path / "pairs.jsonl")]) == 0
    assert capsys.readouterr().out.startswith("all: 3 samples, accuracy 1.000, Cohen's kappa 1.000")
    assert len(model_server.requests) == 6


async def test_rubrics_in_the_environment(model_server: ModelServer, write_file: Callable[..., Path]) -> None:
    register("judge", BUILT_IN["judge"])
    replies = iter(["correct: yes\nstyle: 2/4", "correct: yes\nstyle: 5", "style: 4"])
    model_server.answer = lambda messages: next(replies)
    row = {"reward_spec": {"ground_truth": "42"}}
    results = []
    for _ in range(3):
        env = skyrl_gym.make("judge", env_config={"path": str(write_file(rubric=RUBRIC))}, extras=row)
        env.init(user(f"What is 6 times 7? {len(results)}"))
        output = await env.step_async("42")
        results.append((output["reward"], env.get_metrics()))
    assert results == [(0.875, {"correct": 1, "style": 2}), (None, {"correct": 1}), (None, {"style": 4})]


def test_the_cache_survives_the_process_and_the_budget_makes_scores_unknown(
    model_server: ModelServer, make_panel: Callable[..., Panel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_server.answer = lambda messages: "correct: yes"
    for _ in range(2):
        panel = make_panel(cache=str(tmp_path / "cache.sqlite"), max_requests=1)
        assert panel.judge("?", "Paris", "Paris").score == 1.0
    assert len(model_server.requests) == 1
    results = [panel.judge("?", response).score for response in ("a", "b", "c")]
    assert results == [1.0, None, None]
    assert [record.message for record in caplog.records] == [
        "max_requests=1 of the judge m is used up; all later scores are unknown. Raise it to judge more"
    ]
    panel = make_panel(max_tokens=1000)
    assert [panel.judge("?", response).score for response in "ab"] == [1.0, None], "the server reports no usage"


def test_failures_are_unknown(model_server: ModelServer, make_panel: Callable[..., Panel]) -> None:
    choice = {"message": {"content": "correct: yes"}, "finish_reason": "length"}
    for answer, problem in [
        ((200, json.dumps({"choices": [choice]}).encode()), "stopped early: finish_reason='length'"),
        ((500, b"busy"), "500: busy"),
        ("I am not able to judge this.", "gave no verdict on correct: 'I am not able"),
    ]:
        model_server.answer = lambda messages, answer=answer: answer
        judgement = make_panel().judge("?", "Paris")
        assert judgement.score is None
        assert problem in str(judgement.problem)


@pytest.mark.parametrize(
    ("combine", "answers", "score"),
    [
        ("majority", ("yes", "yes", "no"), 1.0),
        ("mean", ("yes", "yes", "no"), 2 / 3),
        ("mean", ("yes", "no", "?"), 0.5),
        ("majority", ("yes", "no", "?"), None),
        ("mean", ("yes", "?", "?"), None),
    ],
)
async def test_several_judges(
    combine: str, answers: Any, score: Any, model_server: ModelServer, make_panel: Callable[..., Panel]
) -> None:
    replies = iter(answers)
    model_server.answer = lambda messages: f"correct: {next(replies)}"
    judgement = await make_panel("m", "n", "o", combine=combine).judge_async("?", "Paris")
    assert judgement.score == pytest.approx(score)


async def test_a_cancelled_call_stops_its_retries(model_server: ModelServer, make_panel: Callable[..., Panel]) -> None:
    model_server.answer = lambda messages: (503, b"busy")
    model_server.headers["Retry-After"] = "20"
    panel = make_panel(n_attempts=3)
    task = asyncio.create_task(panel.judge_async("?", "Paris"))
    while not model_server.requests:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    started = time.monotonic()
    panel.close()  # waits for its threads
    assert time.monotonic() - started < 10
    assert len(model_server.requests) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling_params": {"response_format": {}}}, "sampling_params sets response_format"),
        ({"template": "{response} {verdicts}"}, r"template has no \{mark\}; add it"),
        ({"tempreature": 1}, "tempreature"),
        ({"rubric": {"criteria": [RUBRIC["criteria"][0]] * 2}}, "several criteria are called correct"),
        ({"base_url": "localhost"}, "must start with http"),
    ],
)
def test_invalid_settings_are_refused(settings: Any, message: str, make_panel: Callable[..., Panel]) -> None:
    with pytest.raises(InvalidSettings, match=message):
        make_panel(**settings)
    with pytest.raises(InvalidSettings, match="two judges are the same"):
        make_panel("m", "m")
