from typing import Any

import pytest

from skyrl_report.summary import format_duration, headline_evals, headlines, select_settings, time_split


def test_headlines_compare_with_the_values_before_training() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "eval/all/avg_score": -0.5, "eval/environment/catch_rate": 0.2},
        *({"step": step, "reward/avg_raw_reward": step / 10, "timing/step": 2.0} for step in range(1, 11)),
        {"step": 10, "eval/all/avg_score": 1.0, "eval/environment/catch_rate": 0.975},
    ]
    found = {headline.label: (headline.value, headline.note) for headline in headlines(rows, {})}
    assert found == {
        "catch rate": ("97.5%", "20% before training"),
        "average score": ("1", "-0.5 before training"),
        "training reward": ("0.8", "0.3 in the first 5 steps"),
        "time": ("20 s", "2 s per step"),
    }


@pytest.mark.parametrize(
    ("logged", "shown"),
    [
        (["eval/environment/catch/catch_rate", "eval/environment/catch_rate"], ["eval/environment/catch_rate"]),
        (["eval/all/pass_at_1", "eval/all/avg_score"], ["eval/all/pass_at_1", "eval/all/avg_score"]),
    ],
)
def test_a_repeated_rate_is_shown_once_and_without_a_rate_the_solved_prompts(
    logged: list[str], shown: list[str]
) -> None:
    assert [series.name for series in headline_evals([{"step": 0} | dict.fromkeys(logged, 0.2)])] == shown


def test_headlines_say_what_passes_and_what_failed() -> None:
    rows = [{"step": 0, "eval/all/pass_at_1": 0.2, "eval/all/avg_score": 0.1, "eval/generate/n_invalid": 6}]
    labels = {headline.label: headline.value for headline in headlines(rows, {})}
    assert labels == {"pass at 1 (reward > 0)": "20%", "average score": "0.1", "failed rollouts": "6"}
    assert headlines(rows, {"generator": {"success_reward": 1.0}})[0].label == "pass at 1 (reward ≥ 1)"
    rows[0]["eval/generate/n_invalid"] = 0
    assert "failed rollouts" not in [headline.label for headline in headlines(rows, {})]


def test_no_time_is_counted_twice() -> None:
    seconds = {"step": 10.0, "generate": 6.0, "eval": 5.0, "sync_weights": 0.01, "policy_train": 3.0}
    row = {"step": 1} | {f"timing/{name}": value for name, value in seconds.items()}
    parts = {part.name: (part.seconds, part.share) for part in time_split([row])}
    assert list(parts) == ["rollouts", "evaluation", "update", "other"]
    assert parts["rollouts"] == (6.0, 0.4)
    assert parts["update"] == (3.0, 0.2)
    assert parts["other"][0] == pytest.approx(1.0)
    assert sum(share for _, share in parts.values()) == pytest.approx(1.0)


def test_settings_of_the_configuration_are_listed_under_the_names_of_the_method() -> None:
    config = {"trainer": {"seed": 0, "epochs": 3, "policy": None}, "generator": {"max_turns": 5}}
    assert select_settings(config) == {"max turns": "5", "epochs": "3", "seed": "0"}
    data = {"max_length": 128}
    assert select_settings({"data": data, "trainer": {"train_batch_size": 16}}) == {"rows per step": "16"}
    config = {"trainer": {"train_batch_size": 16, "dpo": {"beta": 0.1}, "policy": {"model": {"lora": {"rank": 8}}}}}
    assert select_settings(config) == {"LoRA rank": "8", "DPO beta": "0.1", "pairs per step": "16"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (59.4, "59 s"), (125, "2 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
