"""The language-model head with preallocated memory."""

import copy

import torch
from transformers import PreTrainedModel

from skyrl_train.inference_engines.hf.embedded import Head


def test_logits_equal_those_of_the_model_and_reuse_memory(tiny_model: PreTrainedModel) -> None:
    head = Head(tiny_model)
    hidden = torch.randn(5, tiny_model.config.hidden_size)
    with torch.no_grad():
        logits = head.logits(hidden)
        torch.testing.assert_close(logits, tiny_model.lm_head(hidden))
        assert head.logits(hidden[:3]).data_ptr() == logits.data_ptr()
        head.release()
        assert head._memory is None
        model = copy.deepcopy(tiny_model)  # a head with a bias is called directly
        model.lm_head.bias = torch.nn.Parameter(torch.arange(float(model.config.vocab_size)))
        torch.testing.assert_close(Head(model).logits(hidden), model.lm_head(hidden))
