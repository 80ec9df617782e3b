"""An engine and models that leave shared devices while they are idle."""

import asyncio
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.batches import random_batch
from train_kit.workers import SingleRankGroup, config, policy_objective
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms.objectives import Objective, ValueObjective
from skyrl_train.errors import EngineError, SyncError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.launch.launcher import holding_devices
from skyrl_train.launch.lease import Lease
from skyrl_train.models.loading import load_model
from skyrl_train.types import TrainingBatch
from skyrl_train.types.specs import Role
from skyrl_train.weight_sync import Receipt, SyncPlan, WeightSink, WeightSync

IN_TRAINING = {"policy", "optimizer"}
IN_ROLLOUTS = {"policy", "engine", "cache"}


class SlowEngine(PackedEngine):
    """An engine that wakes up slowly, and can lose the weights of a sync."""

    is_broken = False
    n_wake_ups = 0

    async def _restore_memory(self, part: Any) -> None:
        await super()._restore_memory(part)
        self.n_wake_ups += part == "weights"
        await asyncio.sleep(0.05)

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        receipt = await super()._load_weights(plan)
        return receipt._replace(checksum=1) if self.is_broken else receipt


@dataclass
class Run:
    """The models and the engine of a run."""

    policy: SingleRankGroup
    critic: SingleRankGroup
    ref: SingleRankGroup
    engine: SlowEngine
    client: EngineClient
    lease: Lease

    def on_devices(self) -> set[str]:
        """Return what has memory on the devices."""
        optimizers = {name: group.worker._state.optimizer for name, group in self._trained().items()}
        moments = {
            name: [value for values in optimizer.state.values() for value in values.values()]
            for name, optimizer in optimizers.items()
            if optimizer is not None
        }
        tensors = {
            "policy": [*self.policy.model.parameters()],
            "optimizer": moments["policy"],
            "critic": [*self.critic.model.parameters()],
            "optimizer of the critic": moments["critic"],
            "ref": [*self.ref.model.parameters()],
            "engine": [*self.engine._model.parameters()],
            "cache": [pool for layer in self.engine._memory._layers.values() for pool in layer],
        }
        return {name for name, found in tensors.items() if sum(t.untyped_storage().nbytes() for t in found)}

    def _trained(self) -> dict[str, SingleRankGroup]:
        return {"policy": self.policy, "critic": self.critic}

    def sync(self, name: str, sink: WeightSink) -> WeightSync:
        """Return a weight sync from the policy."""
        sinks = {name: sink}
        return WeightSync(self.policy.group, sinks, holding_devices=holding_devices(self.lease, sinks))


def as_group(role: Role, model: PreTrainedModel, objective: Objective | None) -> SingleRankGroup:
    return SingleRankGroup(role, model, config().trainer, objective)


@pytest.fixture
async def run(
    tiny_model: PreTrainedModel, tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> AsyncIterator[Run]:
    cpu = torch.device("cpu")
    value_model = copy.deepcopy(load_model(str(tiny_model_path), "critic", dtype=torch.float32, device=cpu))
    policy = as_group("policy", copy.deepcopy(tiny_model), policy_objective(config().trainer))
    critic = as_group("critic", value_model, ValueObjective(0.2))
    ref = as_group("ref", copy.deepcopy(tiny_model), None)
    lease = Lease()
    for model in (policy, critic, ref):
        await lease.add_model(model.group)
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_cache_bytes": 1 << 24}
    engine = SlowEngine(copy.deepcopy(tiny_model), tiny_tokenizer, owns_model=True, **limits)
    client = EngineClient([engine], enter=lease.enter_engine)
    lease.add_engine(client)
    yield Run(policy, critic, ref, engine, client, lease)
    await lease.close()
    await client.close()


def batch(seed: int = 0) -> TrainingBatch:
    rows = random_batch(seed)
    rows.values = torch.zeros_like(rows.loss_mask)
    return rows


def requests(n: int = 2, n_new: int = 4) -> list[EngineRequest]:
    return [EngineRequest([5, 6, 7 + i], SamplingParams(n_new, ignore_eos=True), seed=i) for i in range(n)]


async def test_each_user_has_the_devices_to_itself_but_for_the_weights_of_the_policy(run: Run) -> None:
    assert run.on_devices() == {"policy", "engine"}
    expected = await run.client.generate(requests())
    assert run.on_devices() == IN_ROLLOUTS
    for model, name in ((run.critic, "critic"), (run.ref, "ref"), (run.policy, "policy")):
        await model.group.score(batch())
        assert run.on_devices() == {name}
    await run.critic.group.update(batch())
    assert run.on_devices() == {"critic", "optimizer of the critic"}
    await run.policy.group.update(batch())
    assert run.on_devices() == IN_TRAINING
    found = await run.client.generate(requests())
    assert run.on_devices() == IN_ROLLOUTS
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [result.logprobs for result in found] == [result.logprobs for result in expected]


async def test_a_sync_leaves_the_engine_awake_and_the_policy_can_score_beside_it(run: Run) -> None:
    await run.client.generate(requests())
    await run.policy.group.update(batch())
    await run.sync("the engine", run.client)(1)
    assert run.on_devices() == {"policy", "engine"}
    (result,) = await run.client.generate(requests(1))
    assert result.weight_spans == ((1, 4),)
    assert run.engine.n_wake_ups == 1
    await run.policy.group.score(batch(), beside_others=True)
    assert run.on_devices() == IN_ROLLOUTS
    await run.sync("the engine", run.client).send_to("the engine", run.client, 2)
    await run.sync("the engine", run.client)(3)
    assert run.engine.n_wake_ups == 1, "it was awake"


async def test_the_reference_receives_the_weights_of_the_policy(run: Run) -> None:
    await run.policy.group.update(batch())
    await run.sync("the reference", run.ref.group)(1)
    assert run.on_devices() == {"policy", "ref"}
    scores = [(await model.group.score(batch()))["logprobs"] for model in (run.ref, run.policy)]
    assert torch.equal(*scores)
    assert run.on_devices() == {"policy"}


async def test_models_do_not_interrupt_requests(run: Run) -> None:
    generating = asyncio.create_task(run.client.generate(requests(1, n_new=200)))
    while not run.client._n_running[0]:
        await asyncio.sleep(0)
    with pytest.raises(EngineError, match="the engine cannot sleep while 1 sequences are being generated"):
        await run.policy.group.score(batch())
    assert len((await generating)[0].token_ids) == 200
    await run.policy.group.score(batch())
    assert run.on_devices() == {"policy"}


async def test_requests_wake_the_engine_once_even_if_the_first_one_is_cancelled(run: Run) -> None:
    await run.policy.group.update(batch())
    first, second = (asyncio.create_task(run.client.generate([request])) for request in requests())
    await asyncio.sleep(0.02)
    assert not first.done()
    first.cancel()
    assert len((await second)[0].token_ids) == 4
    assert run.engine.n_wake_ups == 1
    assert run.on_devices() == IN_ROLLOUTS


async def test_after_a_failed_sync_the_models_get_the_devices(run: Run) -> None:
    await run.policy.group.update(batch())
    run.engine.is_broken = True
    with pytest.raises(SyncError, match="the engine holds other weights than the policy"):
        await run.sync("the engine", run.client)(1)
    assert run.on_devices() == {"policy", "engine"}
    assert await run.policy.group.is_finite()
    assert run.on_devices() == {"policy"}
    run.engine.is_broken = False
    await run.sync("the engine", run.client)(2)
    assert (await run.client.generate(requests(1)))[0].weight_spans == ((2, 4),)


async def test_an_engine_that_shares_the_policys_weights_releases_only_its_cache(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    policy = as_group("policy", copy.deepcopy(tiny_model), policy_objective(config().trainer))
    lease = Lease(moves_models=False)
    await lease.add_model(policy.group)
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_cache_bytes": 1 << 24}
    engine = SlowEngine(policy.model, tiny_tokenizer, **limits)
    client = EngineClient([engine], enter=lease.enter_engine)
    lease.add_engine(client)
    run = Run(policy, policy, policy, engine, client, lease)
    try:
        expected = await client.generate(requests())
        assert "cache" in run.on_devices()
        await policy.group.score(batch())
        assert run.on_devices() >= {"policy", "engine"}
        assert "cache" not in run.on_devices()
        assert [r.logprobs for r in await client.generate(requests())] == [r.logprobs for r in expected]
        await policy.group.update(batch())
        await run.sync("the engine", client)(1)
        assert "optimizer" in run.on_devices()
        (result,) = await client.generate(requests(1))
        assert result.weight_spans == ((1, 4),)
        assert "optimizer" in run.on_devices()
    finally:
        await lease.close()
        await client.close()
