"""The batch passed to the hooks of SkyRL's trainer, and the conversion of token lists to tensors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.dataset.batch import pad_right, pad_tokens
from skyrl_train.errors import DataError
from skyrl_train.types import TrainingBatch

BatchTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]

FIELDS = {
    "sequences": "sequences",
    "attention_mask": "attention_mask",
    "loss_mask": "loss_mask",
    "rewards": "rewards",
    "rollout_logprobs": "rollout_logprobs",
    "action_log_probs": "old_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
"""Keys of a `TrainingInputBatch`, mapped to the fields of a `TrainingBatch`."""


class TrainingInputBatch(dict[str, Any]):
    """A `TrainingBatch` as a dictionary: `data["rewards"]` (B, R), `data["action_log_probs"]`, …

    A tensor that the run does not compute is None. `response_mask` (B, R) is 1 on every response token, and
    `is_last_step` (B,) is True on the last row of each trajectory. Changes to these two have no effect. `metadata` has
    `uids` (one per row; rows of the same prompt share it), `response_length` and `avg_response_length`.
    """

    def __init__(self, batch: TrainingBatch, **metadata: Any) -> None:
        """Create the dictionary. It shares the tensors of `batch`. `metadata` extends the class's metadata."""
        super().__init__()
        response_mask = batch.attention_mask[:, -batch.response_length :]  # (B, R)
        self["response_mask"], self["is_last_step"] = response_mask, batch.is_last_row
        self.metadata: dict[str, Any] = {
            "uids": [str(draw) for draw in batch.draws.tolist()],
            "response_length": batch.response_length,
            "avg_response_length": response_mask.sum(dim=1).double().mean().item(),
            **metadata,
        }
        self.fill(batch)

    def fill(self, batch: TrainingBatch) -> None:
        """Replace the tensors with those in `batch` (with the same rows), and keep other keys."""
        self._batch = batch
        self.update({key: getattr(batch, field) for key, field in FIELDS.items()})

    def to_batch(self) -> TrainingBatch:
        """Return the batch with the tensors of this dictionary. Raise DataError if a shape has changed."""
        fields: dict[str, Any] = {field: self.get(key) for key, field in FIELDS.items()}
        for key, field in FIELDS.items():
            value, before = fields[field], getattr(self._batch, field)
            expected = tuple((self._batch.loss_mask if before is None else before).shape)
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if value is not None and shape != expected:
                raise DataError(f"the batch's {key!r} is {shape}, but must be a tensor {expected}")
        return replace(self._batch, **fields)


def convert_prompts_responses_to_batch_tensors(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rewards: Sequence[Sequence[float]],
    loss_masks: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]] | None = None,
) -> BatchTensors:
    """Return (sequences, attention mask, response mask, rewards, loss mask, engine log-probs).

    The first two are (B, L), the rest (B, R). Prompts are padded on the left, everything else on the right.

    Raises:
        ValueError: the rewards, loss mask or log-probs of a response do not match its length.
    """
    for name, rows in (("rewards", rewards), ("loss_masks", loss_masks), ("logprobs", logprobs)):
        for index, (row, response) in enumerate(zip(rows or (), responses, strict=rows is not None)):
            if len(row) != len(response):
                raise ValueError(f"{name}[{index}] has {len(row)} values for a response of {len(response)} tokens")
    assert isinstance(tokenizer.pad_token_id, int)
    tokens = [([*prompt, *response], len(prompt)) for prompt, response in zip(prompts, responses, strict=True)]
    sequences, attention_mask = pad_tokens(tokens, tokenizer.pad_token_id)
    return (
        sequences,
        attention_mask,
        pad_right([[1] * len(response) for response in responses]),
        pad_right(rewards),
        pad_right(loss_masks),
        None if logprobs is None else pad_right(logprobs),
    )
