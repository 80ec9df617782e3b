"""How fast the engine has been lately: tokens trained on and sampled, from the numbers that it counts up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

SECONDS_BETWEEN = 10.0
MOST_POINTS = 181
"""Half an hour."""
COUNTED = ("tokens_trained", "tokens_sampled")


class Point(NamedTuple):
    """What was counted at a time, by the clock of this process."""

    at: float
    counts: Mapping[str, int]


class Throughput:
    """Of the last half hour, as far as this server was there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)

    def note(self, status: Mapping[str, object]) -> None:
        """What the engine says of itself, every `SECONDS_BETWEEN`."""
        counts = {name: count for name in COUNTED if isinstance(count := status.get(name), int)}
        self._points.append(Point(self._clock(), counts))

    @property
    def seconds(self) -> float:
        """How long it looks back."""
        return self._points[-1].at - self._points[0].at if self._points else 0.0

    def rates(self, name: str) -> list[float]:
        """Per second, from one point to the next. An engine that was started anew counts from 0."""
        return [
            max(0, later.counts.get(name, 0) - earlier.counts.get(name, 0)) / max(later.at - earlier.at, 1e-9)
            for earlier, later in pairwise(self._points)
        ]


def polyline(values: Sequence[float], width: float, height: float) -> str:
    """The points of a line in SVG: the newest value at the right, the largest at the top, and 0 at the bottom."""
    most = max(values, default=0.0) or 1.0
    step = width / max(1, len(values) - 1)
    return " ".join(f"{i * step:.1f},{height - value / most * height:.1f}" for i, value in enumerate(values))
