from collections.abc import Sequence
from typing import Any

import pytest
import torch
from train_kit.cases import pairs_by_default

from skyrl_train.models import linear_head
from skyrl_train.models.linear_head import linear_head_scores
from skyrl_train.types import TokenScores

N, HIDDEN, VOCABULARY = 11, 5, 23
SCALE = 1.7


def inputs(dtype: torch.dtype = torch.float32, spread: float = 3.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, HIDDEN, generator=generator) * spread
    weight, bias = torch.randn(VOCABULARY, HIDDEN, generator=generator), torch.randn(VOCABULARY, generator=generator)
    token_ids = torch.randint(VOCABULARY, (N,), generator=generator)
    token_ids[:2] = torch.tensor([0, VOCABULARY - 1])
    return *(tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)), token_ids


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, token_ids: torch.Tensor
) -> TokenScores:
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logprobs = (SCALE * logits).log_softmax(dim=-1)
    probs = logprobs.exp()
    chosen = logprobs[torch.arange(N), token_ids]
    return TokenScores(chosen, -(probs * logprobs).sum(dim=-1), probs.square().sum(dim=-1))


CASES: dict[str, Sequence[Any]] = {
    "block": [(2048, 1024), (4, 7), (3, 23), (1, 1)],  # the default holds everything
    "n_saved_tokens": [0, 13, VOCABULARY],  # whose exponentials are kept for the backward pass
    "has_bias": [True, False],
    "entropy_grad": [True, False],
    "spread": [0.1, 3.0, 40.0],
}


@pytest.mark.parametrize("case", pairs_by_default(CASES))
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    monkeypatch.setattr(linear_head, "CPU_BLOCK", case["block"])
    monkeypatch.setattr(linear_head, "MAX_SAVED_BYTES", 4 * N * case["n_saved_tokens"])
    has_bias, entropy_grad, spread = case["has_bias"], case["entropy_grad"], case["spread"]
    *leaves, token_ids = inputs(spread=spread)
    if not has_bias:
        leaves[2] = None
    scores = linear_head_scores(*leaves, token_ids, SCALE, entropy_grad=entropy_grad)
    with torch.no_grad():
        before_update = linear_head_scores(*leaves, token_ids, SCALE, entropy_grad=entropy_grad)
    expected = naive(*leaves, token_ids)
    assert torch.equal(scores.logprobs, before_update.logprobs)
    assert torch.equal(scores.entropy, before_update.entropy)
    assert not scores.sum_pi_squared.any()
    for actual, values in zip(before_update, expected, strict=True):
        torch.testing.assert_close(actual.double(), values, atol=2e-5 * max(spread, 1), rtol=2e-5)
    assert [values.requires_grad for values in scores] == [True, entropy_grad, False]

    trained = [leaf for leaf in leaves if leaf is not None]
    weights = torch.linspace(-1, 1, N)
    gradients = []
    for result in (scores, expected):
        loss = (weights * result.logprobs).sum()
        if entropy_grad:
            loss = loss + (weights.flip(0) * result.entropy).sum()
        gradients.append(torch.autograd.grad(loss, trained))
    for actual, values in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, values, atol=1e-4 * max(spread, 1), rtol=1e-4)


def test_a_gradient_of_entropies_alone() -> None:
    hidden, weight, bias, token_ids = inputs()
    gradients = [
        torch.autograd.grad(scores.entropy.sum(), [hidden, weight, bias])
        for scores in (
            linear_head_scores(hidden, weight, bias, token_ids, SCALE, entropy_grad=True),
            naive(hidden, weight, bias, token_ids),
        )
    ]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, bias, token_ids = inputs()
    weight.requires_grad_(False)
    scores = linear_head_scores(hidden, weight, bias, token_ids, SCALE, entropy_grad=False)
    scores.logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_is_computed_in_float32() -> None:
    *leaves, token_ids = inputs(torch.bfloat16)
    scores = linear_head_scores(*leaves, token_ids, SCALE, entropy_grad=False)
    expected = naive(*leaves, token_ids)
    torch.testing.assert_close(scores.logprobs.double(), expected.logprobs, atol=1e-4, rtol=1e-5)
    scores.logprobs.sum().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16] * 3


def test_a_certain_token_has_no_positive_logprob() -> None:
    hidden, weight, bias, _ = inputs(spread=50.0)
    certain = (hidden @ weight.T + bias).argmax(dim=1)
    scores = linear_head_scores(hidden, weight, bias, certain, SCALE, entropy_grad=False)
    assert scores.logprobs.max() <= 0
    assert scores.logprobs.max() > -1e-5


def test_no_positions_and_nan_weights() -> None:
    hidden, weight, bias, token_ids = inputs()
    scores = linear_head_scores(hidden[:0], weight, bias, token_ids[:0], SCALE, entropy_grad=True)
    assert [len(values) for values in scores] == [0, 0, 0]
    scores.logprobs.sum().backward()
    assert not weight.grad.any()
    with torch.no_grad():
        weight[3, 2] = torch.nan
    assert linear_head_scores(hidden, weight, bias, token_ids, SCALE, entropy_grad=False).logprobs.isnan().all()


@pytest.mark.parametrize("has_entropy_grad", [False, True])
@pytest.mark.parametrize("is_update", [False, True])
def test_formulas_of_a_gpu(has_entropy_grad: bool, is_update: bool) -> None:
    hidden, weight, bias, token_ids = inputs()
    logits = (SCALE * (hidden @ weight.T + bias)).detach().requires_grad_()
    lowest, zeros = torch.full((N,), torch.finfo(torch.float32).min), torch.zeros(N)
    sums = (lowest, zeros, zeros, zeros)
    for block in logits.detach().split(9, dim=1):
        sums = linear_head._add_block(block, *sums, is_update)
    highest, total, moment, squares = sums
    log_normalizer = highest + total.log()
    entropy = total.log() - moment / total
    logprobs = logits.log_softmax(dim=-1)
    expected_entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    torch.testing.assert_close(log_normalizer, logits.logsumexp(dim=-1))
    torch.testing.assert_close(entropy, expected_entropy)
    expected_squares = torch.zeros(N) if is_update else logprobs.exp().square().sum(dim=-1)
    torch.testing.assert_close(squares / total.square(), expected_squares)

    by_logprob, by_entropy = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    loss = (logprobs[torch.arange(N), token_ids] * by_logprob).sum()
    if has_entropy_grad:
        loss = loss + (expected_entropy * by_entropy).sum()
    loss.backward()
    for start in range(0, VOCABULARY, 9):
        grad = linear_head._block_gradient(
            logits[:, start : start + 9],
            log_normalizer,
            token_ids - start,
            by_logprob,
            entropy,
            by_entropy if has_entropy_grad else None,
            torch.float32,
        )
        torch.testing.assert_close(grad, logits.grad[:, start : start + 9], rtol=1e-4, atol=1e-5)
