"""The language-model head, step after step into the same memory.

With 150,000 tokens, the logits of a step are tens of megabytes; taking them from the system each time costs a CPU as
much as computing them.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from skyrl_train.models.logprobs import lm_head_logits, scaled_logits

CHUNK_LOGITS = 1 << 24  # logits held at once: 64 MiB


class Head:
    """The head of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._n_tokens = model.get_output_embeddings().weight.shape[0]
        self._memory: torch.Tensor | None = None

    @property
    def max_rows(self) -> int:
        """How many rows to ask for at once."""
        return max(1, CHUNK_LOGITS // self._n_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (b, V) after hidden states (b, H), until the next call: the caller may overwrite them."""
        head = self._model.get_output_embeddings()
        is_plain = type(head) is torch.nn.Linear and head.bias is None and head.weight.dtype == torch.float32
        if not is_plain or hidden.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return lm_head_logits(self._model, hidden)
        if self._memory is None or len(self._memory) < len(hidden):
            self._memory = hidden.new_empty(len(hidden), self._n_tokens)
        out = self._memory[: len(hidden)]
        torch.mm(hidden, head.weight.t(), out=out)
        return scaled_logits(self._model, out)

    def release(self) -> None:
        """Give the memory back."""
        self._memory = None
