"""Timing of the stages of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class StepTimer:
    """A timer that adds up seconds per name: `with timer("generate"): …`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            logger.debug("%s took %.3f s", name, seconds)

    def metrics(self) -> dict[str, float]:
        """Return `timing/<name>` in seconds."""
        return {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
