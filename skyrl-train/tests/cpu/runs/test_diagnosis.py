"""Runs with a bad setting report it. `skyrl-report/tests/test_diagnosis.py` tests the rules themselves."""

from typing import Any

import pytest
import torch
import yaml
from train_kit.runs import stop_after, train

from examples.catch.env import CatchEnv
from skyrl_report.diagnosis import diagnose, read_findings
from skyrl_train.types import Shard, TrainingBatch
from skyrl_train.workers.split import measure_padding


def fail_often(self: CatchEnv, action: str, calls: list[int] = [0]) -> Any:  # noqa: B006, counts the calls
    calls[0] += 1
    if calls[0] % 20 == 0:
        raise RuntimeError("no step today")
    return STEP(self, action)


STEP = CatchEnv.step


@pytest.mark.parametrize(
    ("rule", "overrides"),
    {
        "no_signal": ["generator.sampling_params.temperature=0", "trainer.algorithm.temperature=1"],
        "length_limit": ["generator.sampling_params.max_generate_length=16", "generator.max_turns=1"],
        "invalid_rollouts": ["generator.n_rollout_retries=0"],
    }.items(),
)
def test_runs_with_a_bad_setting_report_it_once(
    rule: str, overrides: list[str], catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if rule == "invalid_rollouts":
        monkeypatch.setattr(CatchEnv, "step", fail_often)
    overrides = [*catch_run, "trainer.eval_interval=-1", "trainer.max_training_steps=5", "trainer.epochs=5", *overrides]
    run = stop_after(4, *overrides, "trainer.ckpt_interval=1")
    findings = read_findings(run.folder / "diagnosis.jsonl")
    assert [finding.step for finding in findings if finding.rule == rule] == [3]
    (text,) = (finding.text for finding in findings if finding.rule == rule)
    assert run.log.count(text) == 1
    assert diagnose(run.metrics, yaml.safe_load((run.folder / "config.yaml").read_text())) == findings
    resumed = train(*overrides)
    assert resumed.log.count(text) == 1, "the resumed run reports it again"
    assert read_findings(run.folder / "diagnosis.jsonl")[: len(findings)] == findings


def test_padding_is_the_share_of_tokens_beyond_each_row() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]])
    rows = TrainingBatch(mask, mask, mask[:, 1:].float(), draws=torch.arange(3))
    assert measure_padding([Shard(rows, [[0, 1], [2]])]) == pytest.approx(3 / 10)
