"""The general engine meets the contract, apart from caches of sessions."""

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from train_kit.architectures import ARCHITECTURES, USUAL, tiny_config
from train_kit.engine_contract import CallContract, ControlContract, EndingContract, SamplingContract, WeightContract
from train_kit.engines import LIMITS, EngineKit, Listener, assert_agrees, assert_same
from train_kit.models import create_model, load_on_cpu
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.hf import GeneralEngine, create_engine
from skyrl_train.inference_engines.hf.embedded import EmbeddedEngine


@pytest.fixture
async def engine_kit(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EngineKit]:
    model, engines = copy.deepcopy(tiny_model), []

    def new(**options: int) -> GeneralEngine:
        engines.append(GeneralEngine(model, tiny_tokenizer, **LIMITS | options))
        return engines[-1]

    yield EngineKit(new, model, tiny_tokenizer, tolerance=1e-5, cache_block_size=1)
    for engine in engines:
        await engine.close()


class TestGeneralContract(SamplingContract, CallContract, EndingContract, WeightContract, ControlContract):
    pass


@pytest.fixture
async def hybrid_kit(tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EngineKit]:
    """An engine of a Qwen3.5, which has three recurrent layers and one with attention."""
    tokens = {"eos_token_id": tiny_tokenizer.eos_token_id, "pad_token_id": tiny_tokenizer.pad_token_id}
    model, engines = create_model(tiny_config("qwen3_5_text", **tokens)).eval(), []

    def new(**options: int) -> EmbeddedEngine[Any]:
        engines.append(create_engine(model, tiny_tokenizer, **LIMITS | options))
        assert isinstance(engines[-1], GeneralEngine)
        return engines[-1]

    yield EngineKit(new, model, tiny_tokenizer, tolerance=1e-4, cache_block_size=1)
    for engine in engines:
        await engine.close()


class TestHybridContract(SamplingContract, WeightContract, ControlContract):
    @pytest.fixture
    def engine_kit(self, hybrid_kit: EngineKit) -> EngineKit:
        return hybrid_kit


async def test_sequences_of_other_lengths_take_turns_if_a_model_cannot_be_padded(engine_kit: EngineKit) -> None:
    class Unpadded(GeneralEngine):
        def _probe(self, model: PreTrainedModel, bf16: bool) -> None:
            super()._probe(model, bf16)
            self._is_padded = False

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
        n_running.append(len(engine._running))
        return type(engine)._decode(engine, *args)

    engine._decode = record
    for request, result in zip(requests, await engine.generate(requests), strict=True):
        assert_agrees(engine_kit, request, result)
    assert max(n_running) == 2
    assert not engine._batches, "its memory is free after the last sequence"
    with pytest.raises(EngineError, match=r"a sequence of 120 tokens needs .* bytes of cache but only"):
        await engine.generate([engine_kit.request(100, 20)])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.nightly) for n in ARCHITECTURES]
)
async def test_sequences_that_join_later_agree_with_the_trainer(
    name: str, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Prompts and replies are shorter and longer than sliding windows and chunks, whose caches are cut."""
    tokens = {"eos_token_id": tiny_tokenizer.eos_token_id, "pad_token_id": tiny_tokenizer.pad_token_id}
    create_model(tiny_config(name, **tokens)).save_pretrained(tmp_path)
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
