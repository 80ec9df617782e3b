"""Rollouts that failed are played again, a bounded number of times."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from skyrl_train.generators.base import BatchMetadata, RolloutRequest
from skyrl_train.generators.rollout import Rollout

logger = logging.getLogger(__name__)

NOT_RETRIED = frozenset({"prompt_too_long", "reward_unknown", "abort"})
"""Stop reasons of invalid trajectories that another attempt would not change."""


async def play_until_valid(
    requests: Sequence[RolloutRequest],
    metadata: BatchMetadata,
    play: Callable[[Sequence[Rollout]], Awaitable[None]],
    *,
    n_retries: int,
) -> list[Rollout]:
    """One rollout for each request, in order; `play` plays each it is given to its end, valid or not."""
    rollouts = [Rollout(request, metadata.seed) for request in requests]
    await play(rollouts)
    for attempt in range(1, n_retries + 1):
        failed = [i for i, rollout in enumerate(rollouts) if rollout.error and rollout.stop_reason not in NOT_RETRIED]
        if not failed:
            break
        _report([rollouts[i] for i in failed], len(rollouts), "are played again")
        again = [Rollout(rollouts[i].request, metadata.seed, attempt) for i in failed]
        await play(again)
        for i, rollout in zip(failed, again, strict=True):
            rollouts[i] = rollout
    _report([rollout for rollout in rollouts if rollout.error], len(rollouts), "are invalid")
    return rollouts


def _report(failed: Sequence[Rollout], n_rollouts: int, what: str) -> None:
    """One warning for each kind of failure, with the traceback of the first."""
    kinds: dict[tuple[str | None, str], list[Rollout]] = {}
    for rollout in failed:
        kinds.setdefault((rollout.stop_reason, type(rollout.cause).__name__), []).append(rollout)
    for alike in kinds.values():
        first = alike[0]
        logger.warning(
            "%d of %d rollouts %s; the first, %s: %s",
            *(len(alike), n_rollouts, what, first.request.id.to_string(), first.error),
            exc_info=first.cause,
        )
