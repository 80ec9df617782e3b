"""A fresh copy of the policy for each test, because workers update it in place."""

import copy

import pytest
from transformers import PreTrainedModel


@pytest.fixture
def policy(tiny_model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(tiny_model)
