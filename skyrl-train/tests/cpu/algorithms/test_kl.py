"""KL estimates, values and gradients: by hand, and by summing over every outcome of a small distribution."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.kl import KLController, compute_approx_kl, importance_weighted_kl, kl_controller
from skyrl_train.config.algorithm import AlgorithmConfig, KLControllerConfig, KLEstimator
from skyrl_train.errors import ConfigError

LOG_2 = math.log(2)
ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)

LOGITS = torch.tensor([0.9, -0.4, 0.3, -1.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
OLD_POLICY = torch.tensor([0.2, 0.3, 0.1, 0.4], dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "d", "value", "gradient"),
    [  # d = ref - policy; the gradient is taken in the policy's log-prob
        ("k1", LOG_2, -LOG_2, 1.0),
        ("k1", -LOG_2, LOG_2, 1.0),
        ("abs", LOG_2, LOG_2, -1.0),
        ("abs", -LOG_2, LOG_2, 1.0),
        ("k2", LOG_2, LOG_2**2 / 2, -LOG_2),
        ("k2", -LOG_2, LOG_2**2 / 2, LOG_2),
        ("k2", -0.5, 0.125, 0.5),
        ("k3", LOG_2, 1 - LOG_2, -1.0),  # 2 - log 2 - 1; gradient 1 - e^d
        ("k3", -LOG_2, LOG_2 - 0.5, 0.5),  # 1/2 + log 2 - 1
        ("k3", -0.5, 0.106531, 1 - math.exp(-0.5)),
        ("k3", 1000.0, 10.0, 0.0),  # clamped to 10, without overflow
        ("k3", -1000.0, 10.0, 0.0),  # d is clamped to ±20
        ("k1+", LOG_2, -LOG_2, -LOG_2),  # the value without the +, the gradient of k2
        ("abs+", LOG_2, LOG_2, -LOG_2),
        ("k3+", LOG_2, 1 - LOG_2, -LOG_2),
        ("k3+", -1000.0, 10.0, 1000.0),
    ],
)
def test_value_and_gradient(estimator: KLEstimator, d: float, value: float, gradient: float) -> None:
    log_probs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    kl = compute_approx_kl(log_probs, log_probs.detach() + d, kl_estimator_type=estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, abs=5e-7)
    assert log_probs.grad.item() == pytest.approx(gradient)


def test_k3_of_a_small_difference_keeps_its_digits() -> None:
    kl = compute_approx_kl(torch.zeros(1), torch.tensor([1e-3]))  # in single precision, e^d - 1 alone has four digits
    assert kl.item() == pytest.approx(1e-6 / 2 + 1e-9 / 6, rel=1e-4)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'k4'.* k1, k2, k3, abs"):
        compute_approx_kl(torch.zeros(1), torch.zeros(1), kl_estimator_type="k4")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_outside_the_mask_are_zero_and_have_no_gradient(estimator: KLEstimator, is_weighted: bool) -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]])
    log_probs = torch.tensor([[-1.0, math.nan, -0.5, -2.0, -math.inf]], requires_grad=True)
    base = torch.tensor([[-1.5, -1.0, -0.7, math.nan, -math.inf]])
    old = torch.tensor([[-1.2, math.nan, -0.6, math.inf, 1.0]])
    if is_weighted:
        kl = importance_weighted_kl(log_probs, base, old, mask, estimator)
    else:
        kl = compute_approx_kl(log_probs, base, mask, estimator)
    kl.sum().backward()
    assert (kl[mask == 0] == 0).all()
    assert (log_probs.grad[mask == 0] == 0).all()
    assert (kl[mask > 0] != 0).all()
    assert (log_probs.grad[mask > 0] != 0).all()
    assert log_probs.grad.isfinite().all()


# Sums over every outcome of a distribution of four tokens: these expectations are exact.


def policy_of(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(dim=-1)


def gradient_in_logits(scalar: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    scalar(policy_of(logits)).backward()
    assert logits.grad is not None
    return logits.grad


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


TRUE_GRADIENT = gradient_in_logits(lambda log_policy: divergence(log_policy, REFERENCE.log()))


def mean_gradient(sampler: torch.Tensor, estimator: KLEstimator, *, is_weighted: bool = False) -> torch.Tensor:
    """Return the expected gradient of a token's estimate over tokens drawn from `sampler`."""

    def mean(log_policy: torch.Tensor) -> torch.Tensor:
        if is_weighted:
            kl = importance_weighted_kl(log_policy, REFERENCE.log(), sampler.log(), kl_estimator_type=estimator)
        else:
            kl = compute_approx_kl(log_policy, REFERENCE.log(), kl_estimator_type=estimator)
        return (sampler * kl).sum()

    return gradient_in_logits(mean)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_these_estimators_are_unbiased(estimator: KLEstimator) -> None:
    log_policy = policy_of(LOGITS)
    expected = divergence(log_policy, REFERENCE.log())
    kl = compute_approx_kl(log_policy, REFERENCE.log(), kl_estimator_type=estimator)
    torch.testing.assert_close((log_policy.exp() * kl).sum(), expected)
    weighted = importance_weighted_kl(log_policy, REFERENCE.log(), OLD_POLICY.log(), kl_estimator_type=estimator)
    torch.testing.assert_close((OLD_POLICY * weighted).sum(), expected)
    assert abs((OLD_POLICY * kl).sum() - expected) > 0.01, "off policy, only the weighted estimate has this mean"


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e != "abs"])
def test_off_policy_only_the_weighted_estimate_has_the_gradient_of_the_divergence(estimator: KLEstimator) -> None:
    torch.testing.assert_close(mean_gradient(OLD_POLICY, estimator, is_weighted=True), TRUE_GRADIENT)
    assert (mean_gradient(OLD_POLICY, estimator) - TRUE_GRADIENT).abs().max() > 0.01


def test_the_weight_never_overflows() -> None:
    kl = importance_weighted_kl(torch.zeros(1), torch.ones(1), torch.tensor([-500.0]), kl_estimator_type="k1")
    assert kl.item() == pytest.approx(-math.exp(20))


@pytest.mark.parametrize(
    ("current", "n_steps", "factor"),
    [
        (0.11, 100, 1 + 0.1 * 0.1),  # a tenth above the target, over a tenth of the horizon
        (0.09, 100, 1 - 0.1 * 0.1),
        (0.1, 100, 1.0),
        (5.0, 100, 1 + 0.2 * 0.1),  # the error is clamped to ±0.2
        (math.inf, 100, 1 + 0.2 * 0.1),
        (-5.0, 100, 1 - 0.2 * 0.1),
        (0.0, 9000, 0.8),  # more trajectories than the horizon still give a positive weight
        (math.nan, 100, 1.0),
    ],
)
def test_the_adaptive_weight_by_hand(current: float, n_steps: int, factor: float) -> None:
    controller = KLController(0.5, target=0.1, horizon=1000)
    controller.update(current, n_steps)
    assert controller.value == pytest.approx(0.5 * factor)


@given(st.lists(st.tuples(st.floats(-1, 10), st.integers(1, 3000)), max_size=20))
def test_the_adaptive_weight_stays_positive_and_is_restored_from_a_checkpoint(steps: list[tuple[float, int]]) -> None:
    controller = KLController(0.5, target=0.1, horizon=1000)
    for current, n_steps in steps:
        controller.update(current, n_steps)
    assert controller.value > 0
    resumed = KLController(0.5, target=0.1, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    controller.update(0.3, 10)
    resumed.update(0.3, 10)
    assert resumed.value == controller.value


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10), (0.1, 0)])
def test_a_target_or_horizon_of_zero_is_refused(target: float, horizon: int) -> None:
    with pytest.raises(ConfigError, match=f"kl_target={target} and kl_ctrl.horizon={horizon} .* must be above 0"):
        KLController(0.5, target, horizon)


def test_each_controller_ignores_the_state_of_the_other() -> None:
    fixed, adaptive = KLController(0.02), KLController(0.5, 0.1, 10)
    fixed.load_state_dict(adaptive.state_dict())
    adaptive.load_state_dict(fixed.state_dict())
    fixed.update(100.0, 1000)
    assert (fixed.value, adaptive.value) == (0.02, 0.5)


def test_the_configuration_chooses_the_controller() -> None:
    fixed = kl_controller(AlgorithmConfig(kl_loss_coef=0.3))
    fixed.update(1.0, 50)
    assert fixed.value == 0.3
    kl_ctrl = KLControllerConfig(type="adaptive", kl_target=0.5, horizon=100)
    adaptive = kl_controller(AlgorithmConfig(kl_loss_coef=0.3, kl_ctrl=kl_ctrl))
    adaptive.update(0.55, 50)
    assert adaptive.value == pytest.approx(0.3 * (1 + 0.1 * 0.5))
