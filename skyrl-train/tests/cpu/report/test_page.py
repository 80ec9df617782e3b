import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from train_kit.pages import Page

from skyrl_train.report import write_report
from skyrl_train.tracking import MetricsFile, RunFolder

METRICS = {
    "reward/avg_raw_reward": 0.5,
    "environment/catch_rate": 0.5,
    "policy/policy_kl": 0.01,
    "policy/policy_entropy": 1.0,
    "policy/grad_norm": 0.7,
    "policy/policy_lr": 1e-6,
    "generate/avg_num_tokens": 12.0,
    "timing/generate": 1.0,
    "timing/step": 2.0,
    "trainer/tokens_per_second": 4000.0,
    "eval/all/avg_score": 0.5,
    "eval/all/pass_at_1": 0.5,
    "eval/environment/catch_rate": 0.5,
    "eval/synthetic_catch/avg_score": 0.5,
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "catch", "shaped")


def _log(folder: RunFolder, rows: list[dict[str, Any]]) -> None:
    file = MetricsFile(folder.metrics)
    for step, row in enumerate(rows):
        file.log(row, step)
    file.close()


def _write(folder: RunFolder, **kwargs: Any) -> tuple[Page, str]:
    text = write_report(folder, **kwargs).read_text("utf-8")
    return Page(text), text


def test_an_empty_run_has_a_page(folder: RunFolder) -> None:
    page, text = _write(folder)
    assert page.headings == ["shaped"]
    assert "No metrics yet." in text


def test_a_complete_run_has_every_section_and_loads_no_urls(folder: RunFolder) -> None:
    _log(folder, [METRICS] * 3)
    folder.config_yaml.write_text("trainer: {seed: 7, policy: {model: {path: tiny}}}\n")
    for step in (0, 2):
        row = {"input_prompt": "Catch!", "output_response": "L", "score": [1.0], "env_class": "catch"}
        (folder.evals(step) / "synthetic_catch.jsonl").write_text(json.dumps(row) + "\n")
    page, text = _write(
        folder, command="make catch SEED=7", baselines={"eval/environment/catch_rate": {"random play": 0.2}}
    )
    assert page.headings == [
        "shaped",
        "Learning curves",
        "Training metrics",
        "Time",
        "Evaluations",
        "Sample episodes",
        "Settings",
        "All metrics",
    ]
    assert page.loads == []
    assert not re.search(r"https?://|url\(|@import|<script", text)
    for expected in (
        "environment: catch",
        "make catch SEED=7",
        "random play 20%",
        "response at step 0",
        "are in evals/",
        "seed: 7",
    ):
        assert expected in text


@hypothesis_settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(allow_subnormal=False, width=32)), max_size=4
    )
)
def test_any_metrics_and_values_give_a_valid_page(tmp_path_factory: Any, rows: list[dict[str, float]]) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    _log(folder, rows)
    _write(folder)


def test_a_rewritten_page_keeps_the_command(folder: RunFolder) -> None:
    command = "python train.py 'a=<b> & \"c\"'"
    _write(folder, command=command)
    _log(folder, [METRICS])
    _, text = _write(folder)
    assert command in html.unescape(text)
    assert _write(folder)[1] == text


def test_responses_are_escaped(folder: RunFolder) -> None:
    row = {
        "input_prompt": "<|im_start|>user\n<b>hi</b>",
        "output_response": "<script>alert(1)</script><|im_end|>",
        "score": None,
        "error": "<i>bad</i>",
        "env_extras": {"answer": "<u>"},
        "data_source": "<s>",
    }
    scored = row | {"score": 1.0}
    (folder.evals(0) / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (row, scored)))
    _, text = _write(folder)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not re.search("<(script|b|i|u)>", text)
    assert '<span class="token">&lt;|im_end|&gt;</span>' in text
    assert "1 of 2 rollouts failed and have no score; the first: &lt;i&gt;bad&lt;/i&gt;" in text


def test_without_an_evaluation_the_rate_of_the_environment_is_shown(folder: RunFolder) -> None:
    _log(folder, [{"environment/catch_rate": 0.25}])
    page, text = _write(folder)
    assert page.headings == ["shaped", "Training metrics", "All metrics"]
    assert "<h3>Catch rate</h3>" in text
