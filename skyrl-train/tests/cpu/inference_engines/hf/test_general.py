"""The general engine meets the contract. It reads an edited session from its start."""

import copy
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train_kit.architectures import each_architecture, tiny_config
from train_kit.engine_contract import (
    CacheContract,
    CallContract,
    ControlContract,
    EndingContract,
    SamplingContract,
    ShortageContract,
    WeightContract,
)
from train_kit.engines import LIMITS, EngineKit, Listener, assert_agrees, assert_same, embedded_kit
from train_kit.models import create_model, load_on_cpu
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.inference_engines.hf import GeneralEngine, create_engine


@pytest.fixture
async def engine_kit(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EngineKit]:
    async with embedded_kit(GeneralEngine, copy.deepcopy(tiny_model), tiny_tokenizer) as kit:
        yield kit


class KeptTurnsContract(CacheContract):
    """The cache of a session is of use only if the next prompt starts with all tokens that it has read."""

    async def test_an_edited_session_reuses_tokens_before_the_edit(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        first = engine_kit.request(150, 8, session="game")
        (result,) = await engine.generate([first])
        read = first.prompt_ids + result.token_ids[:-1]
        for prompt_ids in (read[:100] + engine_kit.prompt(40, seed=5), read[:-1], read):
            edited = replace(first, prompt_ids=prompt_ids)
            (again,) = await engine.generate([edited])
            assert again.n_reused == 0
            assert_agrees(engine_kit, edited, again)
            await engine.end_session("game")
            assert (await engine.generate([first]))[0].n_reused == 0


class TestGeneralContract(
    SamplingContract, CallContract, EndingContract, KeptTurnsContract, WeightContract, ControlContract, ShortageContract
):
    pass


@pytest.fixture
async def hybrid_kit(tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EngineKit]:
    """An engine of a Qwen3.5, which has three recurrent layers and one with attention."""
    model = create_model(tiny_config("qwen3_5_text", tiny_tokenizer)).eval()
    async with embedded_kit(create_engine, model, tiny_tokenizer, tolerance=1e-4) as kit:
        assert isinstance(kit.new(), GeneralEngine)
        yield kit


class TestHybridContract(SamplingContract, KeptTurnsContract, WeightContract, ControlContract):
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


async def test_a_long_prompt_is_read_in_pieces_by_all_its_samples(hybrid_kit: EngineKit) -> None:
    lengths: list[int] = []
    hybrid_kit.model.base_model.register_forward_pre_hook(
        lambda module, args, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    engine = hybrid_kit.new(max_num_batched_tokens=64)
    requests = [replace(hybrid_kit.request(150, 3, ignore_eos=True), seed=seed) for seed in range(2)]
    lengths.clear()  # the probe has read, too
    results = await engine.generate(requests)
    assert lengths == [64, 64, 22, 1, 1]
    for request, result in zip(requests, results, strict=True):
        assert_agrees(hybrid_kit, request, result)


async def test_the_oldest_kept_turn_leaves_if_a_new_sequence_needs_its_room(engine_kit: EngineKit) -> None:
    bytes_per_token = engine_kit.new()._bytes_per_token
    engine = engine_kit.new(max_cache_bytes=100 * bytes_per_token)  # two turns of 50 tokens
    requests = [engine_kit.request(20, 30, seed=i, session=name, ignore_eos=True) for i, name in enumerate("abc")]
    results = [(await engine.generate([request]))[0] for request in requests]
    assert list(engine._turns) == ["b", "c"]
    next_turns = [
        replace(request, prompt_ids=request.prompt_ids + result.token_ids, sampling=SamplingParams(5, ignore_eos=True))
        for request, result in zip(requests, results, strict=True)
    ]
    for n_reused, turn in zip((49, 0), (next_turns[2], next_turns[0]), strict=True):
        (result,) = await engine.generate([turn])
        assert result.n_reused == n_reused
        assert_agrees(engine_kit, turn, result)


@each_architecture()
async def test_sequences_and_turns_that_join_later_agree_with_the_trainer(
    name: str, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Prompts and replies are shorter and longer than sliding windows and chunks, whose caches are cut.

    Prompts of more than ten tokens are read in pieces.
    """
    create_model(tiny_config(name, tiny_tokenizer)).save_pretrained(tmp_path)
    model = load_on_cpu(tmp_path)
    engine = GeneralEngine(model, tiny_tokenizer, **LIMITS | {"max_num_batched_tokens": 10})
    kit = EngineKit(lambda: engine, model, tiny_tokenizer, tolerance=5e-5, cache_block_size=1)
    requests = [
        kit.request(n, n_new, seed=n, session=str(n), ignore_eos=True)
        for n, n_new in ((3, 30), (12, 5), (20, 14), (7, 22), (5, 9), (31, 12))
    ]
    for n_turn in range(2):
        listeners = []
        for request in requests:
            listeners.append(Listener(engine, request))
            await listeners[-1].wait_for(2)
        for i, (request, listener) in enumerate(zip(requests, listeners, strict=True)):
            result = await listener.result()
            assert_agrees(kit, request, result)
            n_read = len(request.prompt_ids) - 1 - i  # all but the last sampled token and the observation
            assert result.n_reused == (n_read if n_turn and name != "jamba" else 0)
            requests[i] = replace(request, prompt_ids=[*request.prompt_ids, *result.token_ids, *kit.prompt(i)])
    await engine.close()
