"""The general engine meets the contract, apart from caches of sessions."""

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from train_kit.architectures import ARCHITECTURES, USUAL, tiny_config
from train_kit.engine_contract import CallContract, ControlContract, EndingContract, SamplingContract, WeightContract
from train_kit.engines import LIMITS, EngineKit, Listener, assert_agrees, assert_same, embedded_kit
from train_kit.models import create_model, load_on_cpu
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.hf import GeneralEngine, create_engine


@pytest.fixture
async def engine_kit(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EngineKit]:
    async with embedded_kit(GeneralEngine, copy.deepcopy(tiny_model), tiny_tokenizer) as kit:
        yield kit


class TestGeneralContract(SamplingContract, CallContract, EndingContract, WeightContract, ControlContract):
    pass


@pytest.fixture
async def hybrid_kit(tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EngineKit]:
    """An engine of a Qwen3.5, which has three recurrent layers and one with attention."""
    model = create_model(tiny_config("qwen3_5_text", tiny_tokenizer)).eval()
    async with embedded_kit(create_engine, model, tiny_tokenizer, tolerance=1e-4) as kit:
        assert isinstance(kit.new(), GeneralEngine)
        yield kit


class TestHybridContract(SamplingContract, WeightContract, ControlContract):
    @pytest.fixture
    def engine_kit(self, hybrid_kit: EngineKit) -> EngineKit:
        return hybrid_kit


async def test_sequences_of_other_lengths_take_turns_if_a_model_cannot_be_padded(engine_kit: EngineKit) -> None:
    class Unpadded(GeneralEngine):
        def _probe(self) -> tuple[int, int]:
            sizes = super()._probe()
            self._is_padded = False
            return sizes

    engine = Unpadded(engine_kit.model, engine_kit.tokenizer, **LIMITS)
    requests = [engine_kit.request(n, 12, seed=n, ignore_eos=True) for n in (5, 30, 9, 9, 5)]
    results = await engine.generate([*requests, requests[1]])
    for request, result in zip(requests, results, strict=False):
        assert_agrees(engine_kit, request, result)
    assert_same(results[-1], results[1], engine_kit.tolerance)
    await engine.close()


async def test_sequences_wait_until_their_last_token_fits(engine_kit: EngineKit) -> None:
    bytes_per_token = engine_kit.new()._bytes_per_token
    engine = engine_kit.new(max_cache_bytes=100 * bytes_per_token)  # two sequences of 50 tokens
    requests = [engine_kit.request(20, 30, seed=seed, ignore_eos=True) for seed in range(5)]
    n_running: list[int] = []

    def record(*args: Any) -> Any:
        n_running.append(len(engine._queue.running))
        return type(engine)._decode(engine, *args)

    engine._decode = record
    for request, result in zip(requests, await engine.generate(requests), strict=True):
        assert_agrees(engine_kit, request, result)
    assert max(n_running) == 2
    assert not engine._batches, "its memory is free after the last sequence"
    with pytest.raises(EngineError, match=r"a sequence of 120 tokens needs .* bytes of key-value cache but only"):
        await engine.generate([engine_kit.request(100, 20)])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.nightly) for n in ARCHITECTURES]
)
async def test_sequences_that_join_later_agree_with_the_trainer(
    name: str, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Prompts and replies are shorter and longer than sliding windows and chunks, whose caches are cut."""
    create_model(tiny_config(name, tiny_tokenizer)).save_pretrained(tmp_path)
    model = load_on_cpu(tmp_path)
    engine = GeneralEngine(model, tiny_tokenizer, **LIMITS)
    kit = EngineKit(lambda: engine, model, tiny_tokenizer, tolerance=2e-5, cache_block_size=1)
    requests = [
        kit.request(n, n_new, seed=n, ignore_eos=True)
        for n, n_new in ((3, 30), (12, 5), (20, 14), (7, 22), (3, 9), (31, 12))
    ]
    listeners = []
    for request in requests:
        listeners.append(Listener(engine, request))
        await listeners[-1].wait_for(2)
    for request, listener in zip(requests, listeners, strict=True):
        assert_agrees(kit, request, await listener.result())
    await engine.close()
