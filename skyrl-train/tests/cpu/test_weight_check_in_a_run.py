"""Runs that check after each weight sync that the engine computes with the policy's weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.config.cli import parse_cli
from skyrl_train.entrypoints.experiment import BasePPOExp
from skyrl_train.errors import DivergenceError, SyncError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult
from skyrl_train.inference_engines.hf import HFEngine
from skyrl_train.weight_sync import Receipt, SyncPlan

CHECK = ["generator.weight_sync_check=logprobs", "trainer.policy.optimizer_config.lr=0.01"]


class ForgetfulEngine(HFEngine):
    """An engine with a copy of the policy that ignores the second and later syncs."""

    n_syncs = 0
    reports_version = True

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        self.n_syncs += 1
        if self.n_syncs == 1:
            return await super()._load_weights(plan)
        return Receipt(plan.version, sum(parameter.nbytes for parameter in self._model.parameters()))

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        before = self._weight_version
        receipt = await super().receive_weights(plan)
        if not self.reports_version and self.n_syncs > 1:
            self._weight_version = before
        return receipt


def experiment(overrides: list[str], engine_class: type[HFEngine], *, copies: bool = True) -> BasePPOExp:
    class Experiment(BasePPOExp):
        def get_engine(self, model: PreTrainedModel) -> HFEngine:
            model = copy.deepcopy(model) if copies else model
            limits: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_cache_bytes": 1 << 26}
            return engine_class(model, self.tokenizer, executor=self._compute, **limits)

    return Experiment(parse_cli(overrides))


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()]


class WideEngine(HFEngine):
    """An engine that counts as 16 copies of the weights."""

    n_weight_copies = 16
    n_requests: ClassVar[list[int]] = []

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        self.n_requests.append(len(requests))
        return await super().generate(requests)


def test_every_copy_of_the_weights_samples_tokens(catch_run: list[str]) -> None:
    experiment([*catch_run, *CHECK], WideEngine).run()
    assert 4 * WideEngine.n_weight_copies in WideEngine.n_requests


def test_the_gap_is_logged_in_every_step(catch_run: list[str], tmp_path: Path) -> None:
    experiment([*catch_run, *CHECK], HFEngine).run()
    assert [row["sync/logprob_gap"] < 1e-5 for row in rows(tmp_path)] == [True] * 3


def test_a_run_whose_engine_shares_the_tensors_checks_nothing(catch_run: list[str], tmp_path: Path) -> None:
    experiment(catch_run, HFEngine, copies=False).run()
    assert not [name for row in rows(tmp_path) for name in row if name.startswith("sync/")]


@pytest.mark.parametrize(("reports_version", "message"), [(True, "differ by"), (False, r"of the versions \[0\]")])
def test_a_broken_sync_ends_the_run_in_the_same_step(
    catch_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports_version: bool, message: str
) -> None:
    monkeypatch.setattr(ForgetfulEngine, "reports_version", reports_version)
    with pytest.raises(SyncError, match=f"weight sync 1 failed: the engine .*{message}"):
        experiment([*catch_run, *CHECK], ForgetfulEngine).run()
    assert [row["step"] for row in rows(tmp_path)] == [0]


def test_diverged_weights_are_reported_as_such(catch_run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load = HFEngine._load_weights

    async def load_nan(self: HFEngine, plan: SyncPlan) -> Receipt:
        receipt = await load(self, plan)
        if plan.version == 1:
            with torch.no_grad():
                self._model.lm_head.weight.fill_(torch.nan)
        return receipt

    monkeypatch.setattr(HFEngine, "_load_weights", load_nan)
    with pytest.raises(DivergenceError, match="the policy has diverged"):
        experiment([*catch_run, *CHECK], HFEngine, copies=False).run()
