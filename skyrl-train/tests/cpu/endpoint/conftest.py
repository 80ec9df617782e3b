"""Stages for agents that call the endpoint."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from train_kit.endpoints import AgentStage, EndpointStage, LiveEndpoint, serving
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@pytest.fixture
async def stage(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EndpointStage]:
    """An endpoint in the event loop of the test."""
    async with EndpointStage(talker, tiny_tokenizer) as stage:
        yield stage


@pytest.fixture(scope="module")
def live(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> Iterator[LiveEndpoint]:
    """An endpoint in a separate thread."""
    with serving(talker, tiny_tokenizer) as live:
        yield live


@pytest.fixture
async def agent_stage(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[AgentStage]:
    """Generators that run agents."""
    agent_stage = AgentStage(talker, tiny_tokenizer)
    yield agent_stage
    await agent_stage.close()


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise importing litellm sends a request
    import litellm

    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    return litellm
