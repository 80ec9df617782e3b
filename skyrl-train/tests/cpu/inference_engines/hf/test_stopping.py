"""When a response ends, with a model that spells: it continues a with b, b with c, and so on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from string import ascii_lowercase

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, SamplingParams
from skyrl_train.inference_engines.hf import HFEngine

LONG_TOKEN = "ActionĠ(L/R/S):"  # one token of the tiny tokenizer


@pytest.fixture(scope="module")
def spelling_model(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """After z comes `LONG_TOKEN`, then a 7, then the end of the turn, then the alphabet again."""
    tokens = [*ascii_lowercase, LONG_TOKEN, "7", tiny_tokenizer.eos_token, "a"]
    token_ids = tiny_tokenizer.convert_tokens_to_ids(tokens)
    assert None not in token_ids
    model = copy.deepcopy(tiny_model)
    with torch.no_grad():
        for layer in model.model.layers:  # each token's state is its embedding and nothing else
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings, head = model.get_input_embeddings().weight.zero_(), model.lm_head.weight.zero_()
        for dimension, (token_id, next_id) in enumerate(pairwise(token_ids)):
            embeddings[token_id, dimension] = 1
            head[next_id, dimension] = 10
    return model


@pytest.fixture
def spell(
    new_engine: Callable[..., HFEngine], spelling_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> Callable[..., object]:
    async def spell(start: str, n_new: int = 100, stop: tuple[str, ...] = ()) -> tuple[str, str]:
        prompt_ids = tiny_tokenizer.convert_tokens_to_ids(list(start))
        sampling = SamplingParams(max_new_tokens=n_new, stop=stop)
        result: EngineResult
        (result,) = await new_engine(spelling_model).generate([EngineRequest(prompt_ids, sampling, seed=0)])
        assert result.logprobs == pytest.approx([0] * len(result.token_ids), abs=1e-5)
        return tiny_tokenizer.decode(result.token_ids), result.stop_reason

    return spell


@pytest.mark.parametrize(
    ("n_new", "stop", "text", "reason"),
    [
        (100, (), "bcdefghijklmnopqrstuvwxyzAction (L/R/S):7<|im_end|>", "stop"),
        (5, (), "bcdef", "length"),
        (1, (), "b", "length"),
        (100, ("fgh",), "bcdefgh", "stop"),
        (7, ("fgh",), "bcdefgh", "stop"),  # the last token allowed completes it
        (6, ("fgh",), "bcdefg", "length"),
        (100, ("xyz", "q", "fgi"), "bcdefghijklmnopq", "stop"),  # whichever comes first
        (100, ("cdefghijklmnopqrstuvw",), "bcdefghijklmnopqrstuvw", "stop"),  # longer than a few tokens
        (100, ("R/S",), "bcdefghijklmnopqrstuvwxyzAction (L/R/S):", "stop"),  # ends inside a token
        (100, ("zA",), "bcdefghijklmnopqrstuvwxyzAction (L/R/S):", "stop"),
        (100, (":7",), "bcdefghijklmnopqrstuvwxyzAction (L/R/S):7", "stop"),
    ],
)
async def test_end_token_length_and_stop_strings(
    spell: Callable[..., object], n_new: int, stop: tuple[str, ...], text: str, reason: str
) -> None:
    assert await spell("a", n_new, stop) == (text, reason)


async def test_a_stop_string_that_begins_in_the_prompt_does_not_count(spell: Callable[..., object]) -> None:
    text, _ = await spell("abc", stop=("bcd", "abc", "uvw"))
    assert text == "defghijklmnopqrstuvw"


async def test_every_end_token_of_the_generation_config_ends_a_response(
    new_engine: Callable[..., HFEngine], spelling_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = copy.deepcopy(spelling_model)
    start, middle = tiny_tokenizer.convert_tokens_to_ids(["a", "f"])
    model.generation_config.eos_token_id = [middle, tiny_tokenizer.pad_token_id]
    sampling = SamplingParams(max_new_tokens=9)
    (result,) = await new_engine(model).generate([EngineRequest([start], sampling, seed=0)])
    assert tiny_tokenizer.decode(result.token_ids) == "bcdef"
    assert result.stop_reason == "stop"


async def test_a_response_ends_with_the_context(
    new_engine: Callable[..., HFEngine], tiny_model: PreTrainedModel
) -> None:
    engine = new_engine()
    assert engine.context_length == tiny_model.config.max_position_embeddings == 512
    sampling = SamplingParams(max_new_tokens=50, temperature=1.0)
    (result,) = await engine.generate([EngineRequest([5] * 508, sampling, seed=0)])
    assert len(result.token_ids) == 4
    assert result.stop_reason == "length"
    for n_prompt in (0, 512, 600):
        with pytest.raises(EngineError, match=f"a prompt of {n_prompt} tokens: this model takes between 1 and 511"):
            await engine.generate([EngineRequest([5] * n_prompt, sampling, seed=0)])
