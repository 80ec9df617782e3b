"""A run with two environments and a curriculum: its metrics, and resuming bit for bit."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from train_kit.datasets import prompt_row
from train_kit.runs import expect_error, stop_after, train

from skyrl_train.dataset.files import read_rows, write_jsonl


def towards_sums(step: int, weights: dict[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Increase the share of the sums by a quarter each step."""
    assert {"reward/sums/avg_raw_reward", "reward/synthetic_catch/avg_raw_reward"} <= set(metrics)
    share = min(0.75, weights["sums"] + 0.25)
    return {"sums": share, "synthetic_catch": 1 - share}


@pytest.fixture
def arguments(catch_run: list[str], catch_data: Path, tmp_path: Path) -> list[str]:
    games = [row | {"env_class": "catch"} for row in read_rows(f"{catch_data}/train.parquet")]
    sums = [
        prompt_row(f"{i} + {i}", "gsm8k", data_source="sums", reward_spec={"ground_truth": str(2 * i)})
        for i in range(8)
    ]
    write_jsonl(tmp_path / "games.jsonl", games)
    write_jsonl(tmp_path / "sums.jsonl", sums)
    return [
        *catch_run,
        f"data.train_data=['{tmp_path}/games.jsonl','{tmp_path}/sums.jsonl']",
        "data.mixture.weights={synthetic_catch:3,sums:1}",
        f"data.mixture.curriculum={__name__}:towards_sums",
        "trainer.max_training_steps=4",
        "trainer.epochs=4",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=1",
        "generator.batched=true",
    ]


def test_a_curriculum_changes_the_shares_and_resumes(arguments: list[str]) -> None:
    whole = train(*arguments, "trainer.run_name=whole")
    assert [step["data/weight/sums"] for step in whole.metrics[1:]] == [0.5, 0.75, 0.75, 0.75]
    assert {"environment/catch/catch_rate", "reward/avg_raw_reward"} <= set(whole.metrics[1])
    stop_after(2, *arguments)
    assert train(*arguments).reproducible_metrics == whole.reproducible_metrics


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.mixture.curriculum=nowhere:f", r"data\.mixture\.curriculum=nowhere:f: No module named 'nowhere'"),
        (f"data.mixture.curriculum={__name__}:towards_sum", "Did you mean 'towards_sums'"),
    ],
)
def test_mistakes_are_reported_before_training(
    arguments: list[str], override: str, message: str, tmp_path: Path
) -> None:
    assert re.search(message, expect_error(*arguments, override))
    assert not (tmp_path / "skyrl/test_run/metrics.jsonl").exists()
