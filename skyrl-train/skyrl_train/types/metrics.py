"""Metrics that merge in any order: over micro-batches, ranks, updates and stages of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from skyrl_train.lazy import torch

MetricKind = Literal["mean", "std", "ess", "sum", "max", "min"]


class Metric(NamedTuple):
    """The sums behind one number, e.g. `Metric("mean", value=6.0, weight=4.0)` is 1.5.

    `mean`, `std` (of the population) and `ess` (effective sample size as a fraction of the samples, (Σx)² / (n Σx²))
    cover all merged samples.
    """

    kind: MetricKind
    value: float
    """Σ weight · x; of `sum`, `max` and `min` the number itself."""
    weight: float = 1.0
    """Σ weight."""
    square: float = 0.0
    """Σ weight · x², for `std` and `ess`."""

    @property
    def number(self) -> float:
        """The number to report."""
        match self.kind:
            case "mean":
                return self.value / self.weight
            case "std":
                return math.sqrt(max(self.square / self.weight - (self.value / self.weight) ** 2, 0.0))
            case "ess":
                return self.value**2 / (self.weight * self.square)
        return self.value

    def merge(self, other: Metric) -> Metric:
        """Return the metric of both sets of samples."""
        assert self.kind == other.kind, f"cannot merge a {self.kind} with a {other.kind}"
        if self.kind in ("max", "min"):
            choose = max if self.kind == "max" else min
            return Metric(self.kind, choose(self.value, other.value))
        return Metric(self.kind, self.value + other.value, self.weight + other.weight, self.square + other.square)


class Metrics(dict[str, Metric]):
    """Metrics by name."""

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Metrics:
        """Wrap numbers; merged with others of the same name, they are averaged."""
        return cls({name: Metric("mean", float(value)) for name, value in numbers.items()})

    def merge(self, *others: Metrics) -> Metrics:
        """Return all of these metrics together; associative and commutative up to rounding."""
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
    """An accumulator for metrics of tensors that moves them off the device all at once."""

    def __init__(self) -> None:
        self._kinds: dict[str, MetricKind] = {}
        self._sums: list[torch.Tensor] = []  # of three numbers each: value, weight, square

    def add(
        self,
        kind: MetricKind,
        name: str,
        value: torch.Tensor | float,
        weight: torch.Tensor | float = 1.0,
        square: torch.Tensor | float = 0.0,
    ) -> None:
        """Add a metric; the arguments are the fields of `Metric`."""
        self._kinds[name] = kind
        fields = (value, weight, square)
        device = next((field.device for field in fields if isinstance(field, torch.Tensor)), None)
        self._sums.append(torch.stack([torch.as_tensor(field, device=device).detach().double() for field in fields]))

    def add_samples(self, name: str, values: torch.Tensor, kinds: tuple[MetricKind, ...] = ("mean",)) -> None:
        """Add metrics of samples (N,), called `name` followed by the kind where there are several kinds."""
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
