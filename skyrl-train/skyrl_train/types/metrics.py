"""Metrics that merge in any order: over micro-batches, ranks, updates and stages of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from skyrl_train.lazy import torch

MetricKind = Literal["mean", "std", "ess", "sum", "max", "min", "expert_load_max", "expert_load_min", "experts_unused"]


class Metric(NamedTuple):
    """The sums behind one number, so that metrics of parts merge to the metric of the whole.

    `mean`, `std` (of the population) and `ess` (effective sample size as a fraction of the samples, (Σx)² / (n Σx²))
    cover all merged samples. The kinds for experts describe `counts`.

    >>> Metric("mean", value=6.0, weight=4.0).number
    1.5
    >>> Metric("mean", value=6.0, weight=4.0).merge(Metric("mean", value=3.0, weight=1.0)).number  # 9 / 5
    1.8
    """

    kind: MetricKind
    value: float
    """Σ weight · x, or for `sum`, `max` and `min` the number itself."""
    weight: float = 1.0
    """Σ weight."""
    square: float = 0.0
    """Σ weight · x², for `std` and `ess`."""
    counts: torch.Tensor | None = None
    """Σ of the tokens (layers, E) that each expert got."""

    @property
    def number(self) -> float:
        """Number to report."""
        match self.kind:
            case "mean":
                return self.value / self.weight
            case "std":
                return math.sqrt(max(self.square / self.weight - (self.value / self.weight) ** 2, 0.0))
            case "ess":
                return self.value**2 / (self.weight * self.square)
        if self.counts is None:
            return self.value
        loads = self.counts / self.counts.mean(dim=1, keepdim=True, dtype=torch.float64)  # 1 if balanced
        if self.kind == "experts_unused":
            return (loads == 0).double().mean().item()
        return (loads.amax(dim=1) if self.kind == "expert_load_max" else loads.amin(dim=1)).mean().item()

    def merge(self, other: Metric) -> Metric:
        """Return the metric of both sets of samples together."""
        assert self.kind == other.kind, f"cannot merge a {self.kind} with a {other.kind}"
        if self.kind in ("max", "min"):
            choose = max if self.kind == "max" else min
            return Metric(self.kind, choose(self.value, other.value))
        counts = None if self.counts is None or other.counts is None else self.counts + other.counts
        sums = (self.value + other.value, self.weight + other.weight, self.square + other.square)
        return Metric(self.kind, *sums, counts)


class Metrics(dict[str, Metric]):
    """Metrics by name."""

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Metrics:
        """Wrap numbers. Numbers of the same name are averaged when they merge."""
        return cls({name: Metric("mean", float(value)) for name, value in numbers.items()})

    def merge(self, *others: Metrics) -> Metrics:
        """Return all of these metrics merged by name. Merging is associative and commutative up to rounding."""
        merged = Metrics(self)
        for metrics in others:
            for name, metric in metrics.items():
                merged[name] = merged[name].merge(metric) if name in merged else metric
        return merged

    def with_prefix(self, prefix: str) -> Metrics:
        """Return the same metrics with `prefix/` before each name."""
        return Metrics({f"{prefix}/{name}": metric for name, metric in self.items()})

    def numbers(self) -> dict[str, float]:
        """Return the number of each metric that has samples."""
        return {name: metric.number for name, metric in self.items() if metric.weight}


class MetricSums:
    """Accumulator for metrics of tensors. It copies them from the device in one go, not one by one."""

    def __init__(self) -> None:
        self._kinds: dict[str, MetricKind] = {}
        self._sums: list[torch.Tensor] = []  # (3,) each: value, weight, square

    def add(
        self,
        kind: MetricKind,
        name: str,
        value: torch.Tensor | float,
        weight: torch.Tensor | float = 1.0,
        square: torch.Tensor | float = 0.0,
    ) -> None:
        """Add a metric. The arguments are the fields of `Metric`."""
        self._kinds[name] = kind
        fields = (value, weight, square)
        device = next((field.device for field in fields if isinstance(field, torch.Tensor)), None)
        self._sums.append(torch.stack([torch.as_tensor(field, device=device).detach().double() for field in fields]))

    def add_samples(self, name: str, values: torch.Tensor, kinds: tuple[MetricKind, ...] = ("mean",)) -> None:
        """Add metrics of samples (N,). They are called `name`, or `name_kind` if there are several kinds."""
        if not len(values):
            return
        values = values.detach().double()
        extremes = {"max": values.max(), "min": values.min()}
        for kind in kinds:
            value = extremes[kind] if kind in extremes else values.sum()
            full_name = f"{name}_{kind}" if len(kinds) > 1 else name
            self.add(kind, full_name, value, 1.0 if kind in extremes else len(values), values.square().sum())

    def metrics(self) -> Metrics:
        """Return the metrics that were added."""
        if not self._sums:
            return Metrics()
        rows = torch.stack([sums.cpu() for sums in self._sums]).tolist()
        return Metrics({name: Metric(kind, *row) for (name, kind), row in zip(self._kinds.items(), rows, strict=True)})
