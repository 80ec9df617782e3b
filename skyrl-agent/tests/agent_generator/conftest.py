"""Stages for agents that call the endpoint."""

from collections.abc import AsyncIterator

import pytest
from agent_kit.agents import AgentStage
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@pytest.fixture
async def agent_stage(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[AgentStage]:
    """Generators that run agents."""
    agent_stage = AgentStage(talker, tiny_tokenizer)
    yield agent_stage
    await agent_stage.close()
