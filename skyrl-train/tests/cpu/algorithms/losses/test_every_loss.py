"""Properties of every built-in policy loss."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skyrl_train.algorithms import policy_loss
from skyrl_train.algorithms.losses.covariance import token_covariance
from skyrl_train.algorithms.registry import POLICY_LOSSES
from skyrl_train.config.algorithm import AlgorithmConfig, CispoConfig, ClipCovConfig, DppoConfig, KLCovConfig

BUILT_IN = [name for name in POLICY_LOSSES.list_available() if policy_loss(name).__module__.startswith("skyrl_train.")]
PROPERTY = settings(max_examples=10)
EACH_LOSS = pytest.mark.parametrize("name", BUILT_IN)
CONFIG = AlgorithmConfig(
    clip_cov=ClipCovConfig(clip_ratio=1.0, clip_cov_lb=0.1),  # all candidates, so nothing is random
    kl_cov=KLCovConfig(kl_cov_frac=0.3),
    cispo=CispoConfig(cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.2),
    dppo=DppoConfig(delta_low=0.05, delta_high=0.05),
)


@dataclass(frozen=True)
class LossInputs:
    """The tensors (B, R) that a loss is called with."""

    log_probs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    rollout: torch.Tensor

    def each(self, function: object) -> "LossInputs":
        """Return a copy with the function applied to every tensor."""
        assert callable(function)
        return LossInputs(*(function(tensor) for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.log_probs, self.old, self.advantages, self.mask, self.rollout


@dataclass(frozen=True)
class LossResult:
    """Loss and metrics on the mask (0 elsewhere) and the gradient everywhere; (B, R) each."""

    loss: torch.Tensor
    gradient: torch.Tensor
    metrics: dict[str, torch.Tensor]


def evaluate(name: str, batch: LossInputs, config: AlgorithmConfig = CONFIG) -> LossResult:
    """Evaluate a loss; the gradient is that of a sum that weights every row differently."""
    log_probs = batch.log_probs.clone().requires_grad_()
    torch.manual_seed(0)
    loss, metrics = policy_loss(name)(log_probs, batch.old, batch.advantages, config, batch.mask, batch.rollout)
    assert loss.shape == batch.mask.shape
    inside = torch.where(batch.mask > 0, loss, 0.0)
    (inside * row_weights(batch)).sum().backward()
    assert log_probs.grad is not None
    on_mask = {key: torch.where(batch.mask > 0, value, 0.0) for key, value in metrics.items()}
    return LossResult(inside.detach(), log_probs.grad, on_mask)


def row_weights(batch: LossInputs) -> torch.Tensor:
    """Return the weight (B, 1) of each row; it depends on neither the position nor the padding of the row."""
    return 1 + torch.where(batch.mask > 0, batch.old, 0.0).sum(dim=-1, keepdim=True).abs()


def assume_no_ties(name: str, batch: LossInputs) -> None:
    """Discard ties: `kl_cov` picks the highest covariances, and the order decides between equal ones."""
    if name == "kl_cov":
        covariance = token_covariance(batch.log_probs, batch.advantages, batch.mask)[batch.mask > 0]
        assume((covariance.sort().values.diff() > 1e-9).all())


def assert_same(one: LossResult, other: LossResult) -> None:
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(one.gradient, other.gradient, rtol=1e-6, atol=1e-9)
    assert one.metrics.keys() == other.metrics.keys()
    for key, value in one.metrics.items():
        torch.testing.assert_close(value, other.metrics[key], rtol=1e-6, atol=1e-9)


@st.composite
def batches(draw: st.DrawFn) -> LossInputs:
    """Random log-probs, some far off policy; rows of any length, including 0; advantages per token or per row."""
    n_rows, n_tokens = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -normal(n_rows, n_tokens).exp()
    spread = draw(st.sampled_from([0.05, 0.5, 3.0]))
    log_probs = (old + spread * normal(n_rows, n_tokens)).clamp(max=-1e-3)
    advantages = normal(n_rows, n_tokens if draw(st.booleans()) else 1).expand(n_rows, n_tokens)
    mask = (torch.rand(n_rows, n_tokens, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))).double()
    rollout = (old + 0.05 * normal(n_rows, n_tokens)).clamp(max=-1e-3)
    return LossInputs(log_probs, old, advantages, mask, rollout)


def test_every_built_in_loss_is_listed() -> None:
    names = "regular dual_clip gspo gspo_token cispo sapo gmpo luspo clip_cov kl_cov dppo vespo dro importance_sampling"
    assert sorted(f"{names} rollout_is policy_gradient cross_entropy".split()) == BUILT_IN


Change = tuple[LossInputs, Callable[[torch.Tensor], torch.Tensor]]
"""Changed inputs, and the function that undoes the change in an output."""


def reorder_rows(batch: LossInputs, rng: random.Random) -> Change:
    order = torch.tensor(rng.sample(range(len(batch.mask)), len(batch.mask)))
    return batch.each(lambda tensor: tensor[order]), lambda tensor: tensor[order.argsort()]


def insert_padding(batch: LossInputs, rng: random.Random) -> Change:
    """Insert one to three columns outside the mask, anywhere."""
    n_tokens = batch.mask.shape[1]
    is_token = torch.ones(n_tokens + rng.randint(1, 3), dtype=torch.bool)
    is_token[rng.sample(range(len(is_token)), len(is_token) - n_tokens)] = False

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        filler = 0.0 if tensor is batch.mask else 123.0
        return tensor.new_full((len(tensor), len(is_token)), filler).masked_scatter(is_token, tensor)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        assert (tensor[:, ~is_token] == 0).all()
        return tensor[:, is_token]

    return batch.each(pad), cut


def poison_other_tokens(batch: LossInputs, rng: random.Random) -> Change:
    garbage = rng.choice([math.nan, math.inf, -math.inf])
    changed = batch.each(lambda tensor: tensor if tensor is batch.mask else tensor.where(batch.mask > 0, garbage))
    return changed, lambda tensor: tensor


def use_boolean_mask(batch: LossInputs, rng: random.Random) -> Change:
    return replace(batch, mask=batch.mask > 0), lambda tensor: tensor


@EACH_LOSS
@PROPERTY
@given(batch=batches(), rng=st.randoms(use_true_random=False))
def test_a_loss_depends_on_the_trained_tokens_only(name: str, batch: LossInputs, rng: random.Random) -> None:
    assume_no_ties(name, batch)
    expected = evaluate(name, batch)
    assert (expected.gradient[batch.mask == 0] == 0).all()
    for change in (reorder_rows, insert_padding, poison_other_tokens, use_boolean_mask):
        changed, undo = change(batch, rng)
        result = evaluate(name, changed)
        metrics = {key: undo(value) for key, value in result.metrics.items()}
        assert_same(LossResult(undo(result.loss), undo(result.gradient), metrics), expected)


@EACH_LOSS
@PROPERTY
@given(batch=batches(), part_size=st.integers(1, 4))
def test_splitting_the_rows_changes_no_token(name: str, batch: LossInputs, part_size: int) -> None:
    if POLICY_LOSSES.traits(name).whole_batch:
        part_size = len(batch.mask)  # these losses are never split
    parts = [
        evaluate(name, LossInputs(*tensors))
        for tensors in zip(*(tensor.split(part_size) for tensor in batch.tensors), strict=True)
    ]
    metrics = {key: torch.cat([part.metrics[key] for part in parts]) for key in parts[0].metrics}
    loss, gradient = torch.cat([part.loss for part in parts]), torch.cat([part.gradient for part in parts])
    assert_same(LossResult(loss, gradient, metrics), evaluate(name, batch))


@EACH_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_give_finite_numbers(name: str, dtype: torch.dtype) -> None:
    old = torch.tensor([[-501.0, -1.0, -501.0, -1.0]] * 3, dtype=dtype)
    log_probs = torch.tensor([[-1.0, -501.0] * 2, [-1.0, -1.0] * 2, [-501.0, -501.0] * 2], dtype=dtype)
    mask = torch.ones_like(old)
    for sign in (1.0, -1.0, 0.0):
        advantages = torch.full_like(old, sign)
        for rollout in (old, log_probs):
            result = evaluate(name, LossInputs(log_probs, old, advantages, mask, rollout))
            for tensor in (result.loss, result.gradient, *result.metrics.values()):
                assert tensor.isfinite().all()
                assert tensor.dtype == dtype


@EACH_LOSS
def test_only_the_log_probs_have_a_gradient(name: str) -> None:
    log_probs, old, advantages, rollout = (torch.full((2, 3), -0.5, requires_grad=True) for _ in range(4))
    loss, metrics = policy_loss(name)(log_probs, old * 1.1, advantages * 1, CONFIG, torch.ones(2, 3), rollout * 1.2)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert [tensor.grad for tensor in (old, advantages, rollout)] == [None] * 3
    assert not any(metric.requires_grad for metric in metrics.values())
    assert all(metric.shape == (2, 3) for metric in metrics.values())


NOT_REINFORCE = {
    "cross_entropy": "ignores the advantages",
    "luspo": "multiplied by the number of tokens of the trajectory",
    "clip_cov": "masks tokens, even on policy",
}


def on_policy(batch: LossInputs) -> LossInputs:
    """Return the batch with one advantage per trajectory, as sequence-level losses require."""
    return replace(
        batch, old=batch.log_probs, rollout=batch.log_probs, advantages=batch.advantages[:, :1].expand_as(batch.mask)
    )


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in NOT_REINFORCE])
@PROPERTY
@given(batch=batches().map(on_policy))
def test_on_policy_the_gradient_is_that_of_reinforce(name: str, batch: LossInputs) -> None:
    expected = -batch.advantages * row_weights(batch) * batch.mask
    torch.testing.assert_close(evaluate(name, batch).gradient, expected, rtol=1e-6, atol=1e-9)


@PROPERTY
@given(batch=batches().map(on_policy))
def test_on_policy_the_exceptions_differ_by_a_known_factor(batch: LossInputs) -> None:
    reinforce = -batch.advantages * row_weights(batch) * batch.mask
    n_tokens = batch.mask.sum(dim=-1, keepdim=True)
    clip_cov = evaluate("clip_cov", batch)
    kept = 1 - clip_cov.metrics["masked_token_ratio"]
    for gradient, expected in (
        (evaluate("luspo", batch).gradient, n_tokens * reinforce),
        (evaluate("cross_entropy", batch).gradient, -row_weights(batch) * batch.mask),
        (clip_cov.gradient, kept * reinforce),
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
