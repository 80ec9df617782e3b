"""The code in the documentation runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyrl_gym
from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.main_catch import register_catch
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.entrypoints.main_base import main

EXTENDING = Path(__file__).parents[3] / "docs/extending.md"


@pytest.fixture
def registered() -> Iterator[list[str]]:
    """Runs the first two examples; the names they registered."""
    register_catch()
    before = {*ADVANTAGE_ESTIMATORS, *POLICY_LOSSES}
    for code in re.findall(r"```python\n(.*?)```", EXTENDING.read_text(encoding="utf-8"), re.DOTALL)[:2]:
        exec(code, {})
    yield [name for name in [*ADVANTAGE_ESTIMATORS, *POLICY_LOSSES] if name not in before]
    for names in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        for name in [name for name in names if name not in before]:
            del names[name]
    skyrl_gym.envs.deregister("catch")


def test_an_estimator_and_a_loss_of_ones_own_train(
    registered: list[str], tiny_model_path: Path, tmp_path: Path
) -> None:
    estimator, loss = registered
    write_dataset(CatchDataset(train_size=4, test_size=2), tmp_path)
    main(
        [
            f"data.train_data=['{tmp_path}/train.parquet']",
            f"data.val_data=['{tmp_path}/validation.parquet']",
            f"trainer.policy.model.path='{tiny_model_path}'",
            f"trainer.output_dir='{tmp_path}'",
            f"trainer.algorithm.advantage_estimator={estimator}",
            f"trainer.algorithm.policy_loss_type={loss}",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=2",
            "trainer.logger=jsonl",
            "generator.max_turns=5",
            "generator.sampling_params.max_generate_length=1",
        ]
    )
    last = json.loads((tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1
    assert 0 <= last["policy/clipped_weights"] <= 1
