import math

import pytest
import torch

from skyrl_train.algorithms.losses import LossOutput, Tokens, importance_ratio, within_mask
from skyrl_train.config.algorithm import AlgorithmConfig


@within_mask
def row_sum(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Multiply all inputs and sum over each row."""
    product = tokens.log_probs * tokens.old_log_probs * tokens.advantages
    if tokens.rollout_logprobs is not None:
        product = product * tokens.rollout_logprobs
    return product.sum(dim=-1, keepdim=True).expand_as(product), {}


def test_a_sum_over_a_row_is_a_sum_over_its_trained_tokens() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    log_probs = torch.tensor([[2.0, math.nan, 3.0]], requires_grad=True)
    other = torch.tensor([[5.0, math.nan, 7.0]])
    for rollout, loss, gradient in ((None, 197.0, [25.0, 0.0, 49.0]), (other, 1279.0, [125.0, 0.0, 343.0])):
        values, _ = row_sum(log_probs, other, other, AlgorithmConfig(), mask, rollout)
        (actual_gradient,) = torch.autograd.grad(values[0, 0], log_probs)
        assert values.tolist() == [[loss] * 3]
        assert actual_gradient.tolist() == [gradient]


def test_the_ratio_of_a_token_never_overflows() -> None:
    log_probs = torch.tensor([0.0, -500.0, math.log(3.0)])
    ratio = importance_ratio(log_probs, torch.tensor([-500.0, 0.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20), 3.0])
