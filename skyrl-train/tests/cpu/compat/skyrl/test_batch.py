"""The conversion of token lists to tensors under SkyRL's name."""

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.compat.skyrl.batch import convert_prompts_responses_to_batch_tensors


def test_prompts_are_padded_on_the_left_and_responses_on_the_right(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    pad = tiny_tokenizer.pad_token_id
    sequences, attention, response, rewards, loss, logprobs = convert_prompts_responses_to_batch_tensors(
        tiny_tokenizer,
        prompts=[[5], [6, 7]],
        responses=[[8, 9, 10], [11]],
        rewards=[[0.0, 0.0, 1.0], [2.0]],
        loss_masks=[[1, 0, 1], [1]],
        logprobs=[[-0.1, -0.2, -0.3], [-0.4]],
    )
    assert sequences.tolist() == [[pad, 5, 8, 9, 10], [6, 7, 11, pad, pad]]
    assert attention.tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert response.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert rewards.tolist() == [[0, 0, 1], [2, 0, 0]]
    assert loss.tolist() == [[1, 0, 1], [1, 0, 0]]
    assert logprobs is not None
    torch.testing.assert_close(logprobs, torch.tensor([[-0.1, -0.2, -0.3], [-0.4, 0, 0]]))
    with pytest.raises(ValueError, match=r"rewards\[0\] has 1 values for a response of 2 tokens"):
        convert_prompts_responses_to_batch_tensors(tiny_tokenizer, [[5]], [[8, 9]], [[1.0]], [[1, 1]])
