"""A policy of one's own for each test: what a worker updates must not be shared."""

from __future__ import annotations

import copy

import pytest
from transformers import PreTrainedModel


@pytest.fixture
def policy(tiny_model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(tiny_model)
