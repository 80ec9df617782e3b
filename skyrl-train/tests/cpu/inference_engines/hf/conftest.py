import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from train_kit.engines import LIMITS
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.hf import PackedEngine


@pytest.fixture
async def new_engine(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, forward_passes: list[int]
) -> AsyncIterator[Callable[..., PackedEngine]]:
    """Create engines, by default of the tiny model, and close them after the test."""
    engines = []

    def make(model: PreTrainedModel = tiny_model, **options: Any) -> PackedEngine:
        engines.append(PackedEngine(model, tiny_tokenizer, **LIMITS | options))
        forward_passes.clear()  # passes that checked the model
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
def forward_passes(tiny_model: PreTrainedModel) -> Iterator[list[int]]:
    """Number of tokens of each forward pass of the tiny model."""
    n_tokens: list[int] = []

    def record(_: torch.nn.Module, __: tuple[()], inputs: dict[str, Any]) -> None:
        n_tokens.append(inputs["input_ids"].numel())

    hook = tiny_model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    yield n_tokens
    hook.remove()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait until a condition holds, for at most a minute."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)

    return wait
