"""A server of vLLM in another process, called over HTTP, meets the engine contract."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from train_kit.engine_contract import EngineContract
from train_kit.engines import EngineKit, assert_agrees
from train_kit.vllm_server import OURS, Server
from train_kit.weight_sync import sync_weights
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.entrypoints import main_base
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.http import call_server
from skyrl_train.inference_engines.vllm.server import VLLMServerEngine
from skyrl_train.weight_sync.base import Transport

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def start_server(tiny_model_path: Path, vllm_options: dict[str, Any]) -> Iterator[Callable[..., Server]]:
    """Start servers of the tiny model, one for each set of options."""
    servers: dict[str, Server] = {}

    def start(**options: Any) -> Server:
        key = repr(sorted(options.items()))
        if key not in servers:
            given = {"model": str(tiny_model_path), **vllm_options, **OURS, **options}
            servers[key] = Server(given, VLLM_SERVER_DEV_MODE="1")
        return servers[key]

    yield start
    for server in servers.values():
        server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(
    start_server: Callable[..., Server], shared_engines: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerBase
) -> AsyncIterator[Any]:
    """Engines of these servers."""
    engines = shared_engines(lambda **options: VLLMServerEngine(start_server(**options).url, tiny_tokenizer))
    yield engines
    await engines.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine_kit(
    engines: Any, tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> AsyncIterator[EngineKit]:
    """Engines behind HTTP."""
    model = copy.deepcopy(tiny_model)
    yield EngineKit(engines.new, model, tiny_tokenizer, 1e-4, cache_block_size=32, transport="gloo")
    await engines.reset()


class TestVLLMServerContract(EngineContract):
    """The engine contract over HTTP."""


async def test_requests_of_other_clients_are_answered(
    engine_kit: EngineKit, start_server: Callable[..., Server]
) -> None:
    engine_kit.new()
    call = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    answer = await asyncio.to_thread(call_server, start_server().url, "POST", "/v1/completions", json=call)
    assert answer["choices"][0]["token_ids"] == engine_kit.greedy([5, 6, 7], 4)


async def test_a_server_keeps_its_own_sampler_if_it_reports_processed_log_probs(
    engine_kit: EngineKit, start_server: Callable[..., Server]
) -> None:
    server = start_server(logprobs_mode="processed_logprobs")
    requests = [
        engine_kit.request(30, 8, temperature=0.7, ignore_eos=True, n_top_logprobs=n_top, seed=n_top)
        for n_top in (0, 2)
    ]
    for sampler in ("seeded", "auto", "native"):  # each replaces the one before
        engine = VLLMServerEngine(server.url, engine_kit.tokenizer, sampler)
        for request, result in zip(requests, await engine.generate(requests), strict=True):
            assert_agrees(engine_kit, request, result)
            best = [set(row.topk(2).indices.tolist()) for row in engine_kit.logits(request, result)]
            assert [set(top) for top in result.top_logprobs or ()] == (best if request is requests[1] else [])
        if sampler == "seeded":
            await engine.generate([engine_kit.request(5, top_p=0.5)])
        else:
            with pytest.raises(EngineError, match=r"top_p=0\.5: generator\.vllm\.sampler=native"):
                await engine.generate([engine_kit.request(5, top_p=0.5)])
        await engine.close()
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        VLLMServerEngine(start_server().url, engine_kit.tokenizer, "native")


@pytest.mark.parametrize("transport", ["auto", "gloo"])
async def test_weights_of_this_process_reach_the_server(engine_kit: EngineKit, transport: Transport) -> None:
    engine = engine_kit.new()
    engine_kit.add_noise()
    await sync_weights(engine, engine_kit.model.named_parameters, 7, transport)
    request = engine_kit.request(30, 8, ignore_eos=True)
    (result,) = await engine.generate([request])
    assert result.weight_spans == ((7, 8),)
    assert_agrees(engine_kit, request, result)
    with pytest.raises(EngineError, match="transport=shared cannot reach the server at http"):
        await sync_weights(engine, engine_kit.model.named_parameters, 8, "shared")


async def test_a_server_that_is_not_ours_is_refused_with_its_command(
    tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, vllm_options: dict[str, Any]
) -> None:
    server = Server({"model": str(tiny_model_path), **vllm_options})
    try:
        with pytest.raises(
            EngineError,
            match=r"cannot control .*start it with `VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve",
        ):
            VLLMServerEngine(server.url, tiny_tokenizer)
    finally:
        server.close()
    with pytest.raises(EngineError, match=r"no server answers at http://127\.0\.0\.1:\d+/health"):
        VLLMServerEngine(server.url, tiny_tokenizer)


def test_a_run_trains_with_a_server(catch_run: list[str], tmp_path: Path, start_server: Callable[..., Server]) -> None:
    server = [
        "generator.backend=vllm",
        "generator.run_engines_locally=false",
        f"generator.remote_inference_engine_urls=['{start_server().url}']",
    ]
    adapter = ["trainer.policy.model.lora.rank=4", "trainer.policy.optimizer_config.lr=0.01"]
    main_base.main([*catch_run, *server, *adapter])
    rows = [json.loads(line) for line in (tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert row["environment/avg_steps"] == 5
        assert row["sync/megabytes"] < 0.4 * rows[0]["sync/megabytes"], "only the adapter is sent"
    assert rows[0]["sync/megabytes"] > 0.5
    assert all(row["sync/verified_copies"] == 1 for row in rows)
