"""Timeouts of collectives, and the check that weight syncs end before them. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

from skyrl_train.errors import ConfigError


def _read_collective_timeout() -> timedelta:
    text = os.environ.get("SKYRL_WORKER_NCCL_TIMEOUT_IN_S", "600")
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"SKYRL_WORKER_NCCL_TIMEOUT_IN_S={text} must be a number of seconds above 0, such as 600")
    return timedelta(seconds=int(text))


COLLECTIVE_TIMEOUT = _read_collective_timeout()
"""Maximum time that a rank in this process waits for others in a collective."""

SYNC_MARGIN_S = 30.0
"""Seconds in which the first rank of the policy reports a failed weight sync, while the others wait for it."""


def find_long_sync(timeout_s: float, collective_timeout: timedelta) -> Iterator[str]:
    """Yield a sentence if ranks of the policy would give up before a weight sync does, without naming its receiver."""
    collective_s = collective_timeout.total_seconds()
    if timeout_s + SYNC_MARGIN_S > collective_s:
        yield (
            f"generator.weight_sync_timeout_seconds={timeout_s:g} must be at least {SYNC_MARGIN_S:g} s less than "
            f"SKYRL_WORKER_NCCL_TIMEOUT_IN_S={collective_s:g}, because the ranks of the policy wait for the first one, "
            "which waits for the engines; lower generator.weight_sync_timeout_seconds, or set "
            f"SKYRL_WORKER_NCCL_TIMEOUT_IN_S={timeout_s + SYNC_MARGIN_S:g} where the ranks start"
        )
