"""Each rule is provoked, and all are silent on recorded metrics of healthy runs (report_kit/healthy_runs.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_report.diagnosis import (
    N_FIRST,
    N_LAST,
    RULES,
    Diagnosis,
    append_findings,
    diagnose,
    find_missing_signal,
    read_findings,
)

ADVANTAGES, NORM = "loss/avg_raw_advantages_abs", "policy/grad_norm"


@pytest.mark.parametrize(
    ("advantages", "norms", "expected"),
    [
        ([0.0, 0.0, 0.0], [0.1, 0.1, 0.1], "all advantages were 0"),
        ([0.3, 0.0, 0.0, 0.0], [0.1] * 4, "all advantages were 0"),
        ([0.3, 0.3, 0.3], [0.0, 0.0, 0.0], "the gradient was 0"),
        ([0.0, 0.0, 0.2], [0.1, 0.1, 0.1], None),
        ([0.0, 0.0], [0.0, 0.0], None),
        ([], [], None),
        ([0.0, None, 0.0, 0.0], [0.1] * 4, "all advantages were 0"),  # null stands for a NaN
    ],
)
def test_three_steps_without_a_signal_are_found(
    advantages: list[Any], norms: list[float], expected: str | None
) -> None:
    rows = [{"step": 0.0}] + [{ADVANTAGES: a, NORM: n} for a, n in zip(advantages, norms, strict=True)]
    warning = find_missing_signal(rows)
    assert warning is None if expected is None else expected in str(warning)


HEALTHY_FILE = Path(__file__).parent / "golden/healthy.jsonl"
HEALTHY = {run["name"]: run for run in map(json.loads, HEALTHY_FILE.read_text().splitlines())}


def healthy_rows(name: str) -> list[dict[str, Any]]:
    """Return the metric rows of a healthy run."""
    columns = HEALTHY[name]["columns"]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_there_are_ten_healthy_runs() -> None:
    assert len(HEALTHY) >= 10


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_have_no_findings(name: str) -> None:
    assert diagnose(healthy_rows(name), HEALTHY[name]["config"]) == []


ASYNC = {"fully_async": {"enabled": True, "max_staleness_steps": 1}}
APART = {"placement": {"colocate_all": False}}
TRAIN_REWARD, SCORE, LENGTH = "reward/avg_raw_reward", "eval/all/avg_score", "generate/avg_num_tokens"


def ramp(start: float, end: float) -> list[float]:
    """Return 40 numbers from start to end."""
    return [start + (end - start) * i / 39 for i in range(40)]


PROVOKED: dict[str, tuple[dict[str, list[float]], dict[str, Any], str]] = {
    "entropy_collapse": (
        {
            "policy/policy_entropy": ramp(1.0, -0.3)[:28] + [0.01] * 12,
            "generate/signal_ratio": [0.1] * 40,
            "reward/avg_pass_at_16": [0.4] * 40,
        },
        {},
        "fell from 0.967 to 0.",
    ),
    "kl_explosion": ({"policy/policy_kl": [0.05] * 30 + ramp(0.1, 8.0)[::4]}, {}, "rose from 0.05 to"),
    "length_limit": (
        {"generate/truncated_ratio": [0.1] * 20 + [0.7] * 20},
        {"generator": {"sampling_params": {"max_generate_length": 1024}}},
        "max_generate_length=1024",
    ),
    "invalid_rollouts": (
        {"generate/n_invalid": [0.0] * 30 + [60.0] * 10, "generate/n_invalid/env_timeout": [0.0] * 30 + [60.0] * 10},
        {},
        "stop reason env_timeout",
    ),
    "reward_hacking": (
        {SCORE: ramp(0.5, 0.9)[:20] + ramp(0.7, 0.2)[:20], TRAIN_REWARD: ramp(0.1, 0.9)},
        {},
        "fell from",
    ),
    "length_change": ({LENGTH: ramp(20, 400), SCORE: [-0.9] * 40, TRAIN_REWARD: ramp(0.1, 0.9)}, {}, "grew from"),
    "logprob_mismatch": (
        {"policy/rollout_train_logprobs_abs_diff_mean": [0.001] * 20 + [0.2] * 20, "async/staleness_max": [0.0] * 40},
        {},
        "0.0673 nats per token",
    ),
    "idle_engine": ({"timing/step": [100.0] * 40, "timing/generate": [20.0] * 40}, APART, "20% of a step"),
    "idle_engine in asynchronous training": (
        {"async/gen_buffer_qsize_at_wait_start": [0.0] * 20 + [2.0] * 20},
        ASYNC,
        "all 2 batches are already played",
    ),
    "stragglers": (
        {
            "timing/step": [100.0] * 40,
            "timing/generate": [80.0] * 40,
            "generate/avg_seconds": [6.0] * 40,
            "generate/max_seconds": [79.0] * 40,
        },
        {},
        "takes 79.0 s",
    ),
    "padding": ({"memory/padding_ratio_policy": [0.7] * 40}, {}, "70% of the tokens"),
    "memory_creep": ({"memory/step": [*[2.0] * 6, *ramp(2.0, 4.0), *[4.0] * 4]}, {}, "GB over 40 steps"),
    "unused_tools": ({"agent/no_tool_calls": [0.0] * 20 + [1.0] * 20}, {}, "no reply called one"),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_change_of_a_healthy_run_provokes_its_rule_alone(name: str) -> None:
    columns, trainer_or_generator, text = PROVOKED[name]
    rows, config = healthy_rows("grpo"), dict(HEALTHY["grpo"]["config"])
    for section, values in trainer_or_generator.items():
        name_of_section = "generator" if section == "generator" else "trainer"
        new = values if section == "generator" else {section: values}
        config[name_of_section] = config[name_of_section] | new
    for metric, values in columns.items():
        if len(values) > len(rows) - 1:
            rows += [{"step": step} for step in range(len(rows), len(values) + 1)]
        for row, value in zip(rows[1:], values, strict=False):
            row[metric] = value
    (finding,) = diagnose(rows, config)
    assert finding.rule == name.split()[0]
    assert text in finding.text


def test_every_rule_is_provoked() -> None:
    in_runs = {"no_signal"}
    assert {name.split()[0] for name in PROVOKED} | in_runs == RULES.keys()


def test_a_long_run_costs_the_same_and_cut_lines_are_left_out(tmp_path: Path) -> None:
    diagnosis, file = Diagnosis({}), tmp_path / "diagnosis.jsonl"
    for step in range(1000):
        append_findings(file, diagnosis.add({"step": step, ADVANTAGES: 0.0 if step > 800 else 0.5}))
    assert len(diagnosis._first) + len(diagnosis._last) == N_FIRST + N_LAST
    with file.open("a") as lines:
        lines.write('{"step": 900, "ru')
    assert [finding.step for finding in read_findings(file)] == [803]
