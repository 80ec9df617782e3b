"""Timeouts of collectives, and a check that weight syncs time out earlier. Does not import torch."""

import math
import os
from collections.abc import Iterator
from datetime import timedelta

from skyrl_train.errors import ConfigError


def _read_collective_timeout() -> timedelta:
    text = os.environ.get("SKYRL_WORKER_NCCL_TIMEOUT_IN_S", "600")
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(
            f"SKYRL_WORKER_NCCL_TIMEOUT_IN_S={text} must be a whole number of seconds above 0, such as 600"
        )
    return timedelta(seconds=int(text))


COLLECTIVE_TIMEOUT = _read_collective_timeout()
"""Maximum time that a rank in this process waits for other ranks in a collective."""

SYNC_MARGIN_S = 30.0
"""Seconds that the policy's first rank gets to report a failed weight sync before the other ranks stop waiting."""


def find_long_sync(timeout_s: float, collective_timeout: timedelta) -> Iterator[str]:
    """Yield a sentence if the policy's ranks would time out before a weight sync does.

    The weight sync's error names the receiver that hangs. A collective's error cannot.
    """
    collective_s = collective_timeout.total_seconds()
    if timeout_s + SYNC_MARGIN_S > collective_s:
        yield (
            f"generator.weight_sync_timeout_seconds={timeout_s:g} must be at least {SYNC_MARGIN_S:g} s less than "
            f"SKYRL_WORKER_NCCL_TIMEOUT_IN_S={collective_s:g}, because the policy's other ranks wait for its first "
            "rank while it waits for the engines; lower generator.weight_sync_timeout_seconds, or set "
            f"SKYRL_WORKER_NCCL_TIMEOUT_IN_S={math.ceil(timeout_s + SYNC_MARGIN_S)} where the ranks start"
        )
