"""Trajectories made without rollouts."""

from collections.abc import Sequence
from typing import Any

from skyrl_train.types import Segment, Trajectory, TrajectoryID, Turn


def make_segment(
    rewards: Sequence[float] = (0.0,),
    *,
    prompt_ids: Sequence[int] = (1, 2),
    response_ids: Sequence[int] | None = None,
    loss_mask: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = (),
    sampling_logprobs: list[float] | None = None,
    turns: Sequence[Turn] = (),
) -> Segment:
    """Return a segment with one sampled token per reward; the other arguments override parts of it."""
    response = list(range(3, 3 + len(rewards))) if response_ids is None else list(response_ids)
    if logprobs is not None:
        logprobs = list(logprobs) or [-0.5] * len(response)
    return Segment(
        token_ids=[*prompt_ids, *response],
        n_prompt=len(prompt_ids),
        loss_mask=[1] * len(response) if loss_mask is None else list(loss_mask),
        rewards=list(rewards),
        logprobs=logprobs,
        sampling_logprobs=sampling_logprobs,
        turns=tuple(turns),
    )


SEGMENT_FIELDS = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "sampling_logprobs", "turns")


def make_trajectory(
    uid: str = "0",
    rewards: Sequence[float] | None = (0.0,),
    *,
    repetition: int = 0,
    draw: int | None = None,
    earlier: Sequence[Segment] = (),
    **fields: Any,
) -> Trajectory:
    """Return a trajectory whose last segment has one token per reward; `rewards=None` makes it invalid.

    `draw` defaults to the number in `uid`, or to a number derived from its letters.
    """
    error: str | None = None
    segment_fields = {name: fields.pop(name) for name in SEGMENT_FIELDS if name in fields}
    if rewards is None:
        rewards, error = [0.0] * len(segment_fields.get("response_ids", (0,))), "env_error"
    segment = make_segment(rewards, **segment_fields)
    if draw is None:
        draw = int(uid) if uid.isdecimal() else int.from_bytes(uid.encode(), "big")
    defaults: dict[str, Any] = {"env_class": "guess", "data_source": "unknown", "stop_reason": "stop", "error": error}
    id = TrajectoryID(uid, repetition, draw)
    return Trajectory(id=id, segments=(*earlier, segment), **(defaults | fields))
