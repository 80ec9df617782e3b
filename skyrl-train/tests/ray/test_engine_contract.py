"""The engine contract for an engine in an actor that Ray has placed."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError
from train_kit.engine_contract import EngineContract
from train_kit.engines import EngineKit, Listener
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineLostError
from skyrl_train.inference_engines.base import EngineRequest, InferenceEngine, SamplingParams
from skyrl_train.inference_engines.hf import load_engine
from skyrl_train.inference_engines.remote import RemoteEngine, new_token
from skyrl_train.launch.ray.actors import connect_engine, start_engine_actor
from skyrl_train.launch.ray.cluster import connect as connect_to_cluster

LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_cache_bytes": 1 << 28}
START_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this process."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("RAY_ADDRESS", "local")
        connect_to_cluster()
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def place(cluster: None) -> Iterator[Callable[[Callable[[], InferenceEngine]], RemoteEngine]]:
    """Make engines in one actor, which serves its connections one after the other."""
    actor, token = start_engine_actor({"num_cpus": 1}), new_token()
    address, name = ray.get(actor.serve.remote(token, 1, ""), timeout=START_TIMEOUT_S)

    def new(make_engine: Callable[[], InferenceEngine]) -> RemoteEngine:
        return RemoteEngine(address, token, make_engine, lambda: f"{name} ended", start_timeout_s=START_TIMEOUT_S)

    yield new
    ray.kill(actor)


@pytest.fixture
async def engine_kit(
    place: Callable[..., RemoteEngine],
    tiny_model_path: Path,
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> AsyncIterator[EngineKit]:
    """An engine in the actor, with its own copy of the policy."""
    engines: list[RemoteEngine] = []

    def new(**options: Any) -> RemoteEngine:
        engines.append(place(partial(load_engine, str(tiny_model_path), dtype=torch.float32, **LIMITS | options)))
        return engines[-1]

    model = copy.deepcopy(tiny_model)
    yield EngineKit(new, model, tiny_tokenizer, tolerance=1e-5, cache_block_size=1, transport="auto")
    for engine in engines:
        await engine.close()


class TestRayWrappedContract(EngineContract):
    """The engine contract over a socket of an actor."""


async def test_an_actor_that_is_killed_fails_its_requests(cluster: None, tiny_model_path: Path) -> None:
    actor = start_engine_actor({"num_cpus": 1})
    make_engine = partial(load_engine, str(tiny_model_path), dtype=torch.float32, **LIMITS)
    engine = await connect_engine(actor, make_engine, START_TIMEOUT_S, n_processes=1)
    assert isinstance(engine, RemoteEngine)
    listener = Listener(engine, EngineRequest([5, 6, 7], SamplingParams(400, ignore_eos=True), seed=0))
    await listener.wait_for(1)
    ray.kill(actor)
    with pytest.raises(EngineLostError, match=r"engine process \d+ on .* was killed or crashed; start another engine"):
        await listener.result()
    await engine.close()


async def test_closing_an_engine_ends_its_actor(cluster: None, tiny_model_path: Path) -> None:
    actor = start_engine_actor({"num_cpus": 1})
    make_engine = partial(load_engine, str(tiny_model_path), dtype=torch.float32, **LIMITS)
    engine = await connect_engine(actor, make_engine, START_TIMEOUT_S, n_processes=1)
    (result,) = await engine.generate([EngineRequest([5, 6, 7], SamplingParams(4), seed=0)])
    assert result.token_ids
    await engine.close()

    async def wait_for_end() -> None:
        while await actor.is_alive.remote():
            await asyncio.sleep(0.1)

    with pytest.raises(RayActorError):
        await asyncio.wait_for(wait_for_end(), 30)
