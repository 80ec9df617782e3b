import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.types import Metric, MetricKind, Metrics, MetricSums

KINDS: tuple[MetricKind, ...] = ("mean", "std", "ess", "sum", "max", "min")

samples = st.lists(st.floats(min_value=0.125, max_value=8, width=32), max_size=5)
parts = st.lists(samples, min_size=1, max_size=6)


def collect(values: Sequence[float], name: str = "x") -> Metrics:
    """Return metrics of every kind, as an objective collects them from one micro-batch."""
    sums = MetricSums()
    sums.add_samples(name, torch.tensor(values), KINDS)
    return sums.metrics()


def expected(values: Sequence[float]) -> dict[str, float]:
    """Return each number from its definition."""
    if not values:
        return {}
    mean = sum(values) / len(values)
    return {
        "x_mean": mean,
        "x_std": math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)),
        "x_ess": sum(values) ** 2 / (len(values) * sum(v * v for v in values)),
        "x_sum": sum(values),
        "x_max": max(values),
        "x_min": min(values),
    }


@given(parts)
def test_merged_metrics_equal_those_of_all_samples(split_values: list[list[float]]) -> None:
    merged = Metrics().merge(*map(collect, split_values))
    flat = [value for part in split_values for value in part]
    assert merged.numbers() == pytest.approx(expected(flat), rel=1e-6, abs=1e-5)


@given(samples, samples, samples)
def test_merging_is_associative_and_commutative(a: list[float], b: list[float], c: list[float]) -> None:
    x, y, z = map(collect, (a, b, c))
    for other in (x.merge(y).merge(z), x.merge(y.merge(z)), z.merge(x, y), Metrics().merge(y, z, x)):
        assert other.keys() == x.merge(y, z).keys()
        for name, metric in x.merge(y, z).items():
            assert other[name].kind == metric.kind
            assert other[name][1:] == pytest.approx(metric[1:])


def test_merging_does_not_change_its_inputs() -> None:
    left, right = collect([1.0, 2.0]), collect([4.0])
    before = dict(left), dict(right)
    left.merge(right)
    assert (dict(left), dict(right)) == before


def test_single_numbers_are_averaged() -> None:
    merged = Metrics.of({"a": 1}).merge(Metrics.of({"a": 2, "b": 5}))
    assert merged.numbers() == {"a": 1.5, "b": 5.0}
    assert merged.with_prefix("policy").numbers() == {"policy/a": 1.5, "policy/b": 5.0}


def test_a_metric_of_weight_zero_has_no_number() -> None:
    assert Metrics({"loss": Metric("mean", 0.0, 0.0), "n": Metric("sum", 3.0)}).numbers() == {"n": 3.0}


def test_different_kinds_do_not_merge() -> None:
    with pytest.raises(AssertionError, match="cannot merge a mean with a max"):
        Metric("mean", 1.0).merge(Metric("max", 1.0))


def test_sums_of_different_metrics_are_independent() -> None:
    sums = MetricSums()
    sums.add("mean", "loss", torch.tensor(6.0, requires_grad=True), torch.tensor(4.0))
    sums.add("sum", "tokens", 12)
    sums.add_samples("none", torch.zeros(0))
    assert sums.metrics() == {"loss": Metric("mean", 6.0, 4.0, 0.0), "tokens": Metric("sum", 12.0, 1.0, 0.0)}
    assert MetricSums().metrics() == {}


def test_numbers_are_added_on_the_device_of_their_tensors() -> None:
    sums = MetricSums()
    sums.add("mean", "loss", torch.ones((), device="meta"), 2.0)  # meta tensors refuse those of other devices
    assert sums._sums[0].device.type == "meta"
