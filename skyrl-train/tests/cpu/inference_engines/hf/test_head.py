"""The language-model head with preallocated memory."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.inference_engines.hf import engine
from skyrl_train.inference_engines.hf.engine import Head


def test_logits_equal_those_of_the_model_and_reuse_memory(tiny_model: PreTrainedModel) -> None:
    head = Head(tiny_model)
    hidden = torch.randn(5, tiny_model.config.hidden_size)
    with torch.no_grad():
        logits = head.logits(hidden)
        torch.testing.assert_close(logits, tiny_model.lm_head(hidden))
        assert head.logits(hidden[:3]).data_ptr() == logits.data_ptr()
        head.release()
        assert head._memory is None


def test_other_heads_are_called_directly(tiny_model: PreTrainedModel) -> None:
    model = copy.deepcopy(tiny_model)
    model.lm_head.bias = torch.nn.Parameter(torch.arange(float(model.config.vocab_size)))
    hidden = torch.randn(5, model.config.hidden_size)
    with torch.no_grad():
        torch.testing.assert_close(Head(model).logits(hidden), model.lm_head(hidden))


def test_max_rows_depends_on_the_chunk_size(tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    n_tokens = tiny_model.config.vocab_size
    monkeypatch.setattr(engine, "CHUNK_LOGITS", 3 * n_tokens + 1)
    assert Head(tiny_model).max_rows == 3
    monkeypatch.setattr(engine, "CHUNK_LOGITS", 1)
    assert Head(tiny_model).max_rows == 1
