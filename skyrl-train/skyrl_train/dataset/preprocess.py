"""The conversion of token lists to tensors under the name that SkyRL's scripts import."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.dataset.batch import pad_right, pad_tokens

BatchTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def convert_prompts_responses_to_batch_tensors(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rewards: Sequence[Sequence[float]],
    loss_masks: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]] | None = None,
) -> BatchTensors:
    """Return sequences and attention mask (B, L); response mask, rewards, loss mask and log-probs of the engine (B, R).

    Prompts are padded on the left, everything else on the right. All values of a response have its length.
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
