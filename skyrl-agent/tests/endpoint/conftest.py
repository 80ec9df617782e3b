"""Stages for agents that call the endpoint."""

from collections.abc import AsyncIterator, Iterator

import pytest
from agent_kit.endpoints import EndpointStage, LiveEndpoint, serving
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
