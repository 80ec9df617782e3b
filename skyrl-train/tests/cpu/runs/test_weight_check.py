"""Runs that check after each weight sync that the engine computes with the policy's weights."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from train_kit.runs import Run, run_of
from transformers import PreTrainedModel

from skyrl_train.config.cli import parse_cli
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.errors import DivergenceError, SyncError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.weight_sync import Receipt, SyncPlan

CHECK = "generator.weight_sync_check=logprobs"


@pytest.fixture
def arguments(catch_run: list[str]) -> list[str]:
    learning_rate = "trainer.policy.optimizer_config.lr=0.01"
    return [*catch_run, learning_rate, "trainer.eval_interval=-1", "trainer.ckpt_interval=-1"]


def train_with_engine(engine_class: type[PackedEngine], *overrides: str, copies: bool = True) -> Run:
    """Train with an engine that has a copy of the policy, or its tensors."""

    class Experiment(RLExperiment):
        def get_engine(self, model: PreTrainedModel) -> PackedEngine:
            model = copy.deepcopy(model) if copies else model
            limits: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_cache_bytes": 1 << 26}
            return engine_class(model, self.tokenizer, executor=self._compute, **limits)

    Experiment(parse_cli(overrides)).run()
    return run_of(overrides)


def test_every_copy_of_the_weights_samples_tokens_and_the_gap_is_logged_in_every_step(arguments: list[str]) -> None:
    n_requests: list[int] = []

    class WideEngine(PackedEngine):
        """An engine that counts as 16 copies of the weights."""

        n_weight_copies = 16

        async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
            n_requests.append(len(requests))
            return await super().generate(requests)

    run = train_with_engine(WideEngine, *arguments, CHECK)
    assert [step["sync/logprob_gap"] < 1e-5 for step in run.metrics] == [True] * 3
    assert 4 * WideEngine.n_weight_copies in n_requests


def test_a_run_whose_engine_shares_the_tensors_checks_nothing(arguments: list[str]) -> None:
    run = train_with_engine(PackedEngine, *arguments, copies=False)
    assert not [name for step in run.metrics for name in step if name.startswith("sync/")]


class ForgetfulEngine(PackedEngine):
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


@pytest.mark.parametrize(("reports_version", "message"), [(True, "differ by"), (False, r"of the versions \[0\]")])
def test_a_broken_sync_ends_the_run_in_the_same_step(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, reports_version: bool, message: str
) -> None:
    monkeypatch.setattr(ForgetfulEngine, "reports_version", reports_version)
    with pytest.raises(SyncError, match=f"weight sync 1 failed: the engine .*{message}"):
        train_with_engine(ForgetfulEngine, *arguments, CHECK)
    assert run_of(arguments).steps == [0]


def test_diverged_weights_are_reported_as_such(arguments: list[str]) -> None:
    class DivergedEngine(PackedEngine):
        async def _load_weights(self, plan: SyncPlan) -> Receipt:
            receipt = await super()._load_weights(plan)
            if plan.version == 1:
                with torch.no_grad():
                    self._model.lm_head.weight.fill_(torch.nan)
            return receipt

    with pytest.raises(DivergenceError, match="the policy has diverged"):
        train_with_engine(DivergedEngine, *arguments, CHECK, copies=False)
