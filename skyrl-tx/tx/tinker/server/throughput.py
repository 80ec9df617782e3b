"""Recent throughput of the engine: trained and sampled tokens per second, from its counters."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

RECORD_INTERVAL_SEC = 10.0
MAX_POINTS = 181
"""Half an hour of points."""
COUNTERS = ("tokens_trained", "tokens_sampled")


class Point(NamedTuple):
    """Counters at a time of this process's clock."""

    at: float
    counts: Mapping[str, int]


class Throughput:
    """Throughput of the last half hour, or since the server started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)

    def record(self, status: Mapping[str, object]) -> None:
        """Record the engine's status. Call this every `RECORD_INTERVAL_SEC`."""
        counts = {name: count for name in COUNTERS if isinstance(count := status.get(name), int)}
        self._points.append(Point(self._clock(), counts))

    @property
    def seconds(self) -> float:
        """The recorded time span in seconds."""
        return self._points[-1].at - self._points[0].at if self._points else 0.0

    def rates(self, name: str) -> list[float]:
        """Return the rates per second between consecutive points. A decrease counts as 0: a restart resets counters."""
        return [
            max(0, later.counts.get(name, 0) - earlier.counts.get(name, 0)) / max(later.at - earlier.at, 1e-9)
            for earlier, later in pairwise(self._points)
        ]


def polyline(values: Sequence[float], width: float, height: float) -> str:
    """Return the points of an SVG line: latest value on the right, maximum at the top, 0 at the bottom."""
    maximum = max(values, default=0.0) or 1.0
    step = width / max(1, len(values) - 1)
    return " ".join(f"{i * step:.1f},{height - value / maximum * height:.1f}" for i, value in enumerate(values))
