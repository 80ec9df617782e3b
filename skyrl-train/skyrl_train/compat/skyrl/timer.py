"""SkyRL's timer."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)


class Timer:
    """A timer: `with Timer("reward", seconds):` adds to `seconds["reward"]`. `async with` also works."""

    def __init__(self, message: str, update_dict: dict[str, float] | None = None) -> None:
        """Time the block called `message`. Without `update_dict`, the result is only logged."""
        self._message = message
        self._seconds = {} if update_dict is None else update_dict

    def __enter__(self) -> Timer:
        self._started = time.perf_counter()
        logger.info("Started: %s", self._message)
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._started
        self._seconds[self._message] = self._seconds.get(self._message, 0.0) + seconds
        logger.info("Finished: %s in %.3f s", self._message, seconds)

    async def __aenter__(self) -> Timer:
        return self.__enter__()

    async def __aexit__(self, *details: object) -> None:
        self.__exit__(*details)
