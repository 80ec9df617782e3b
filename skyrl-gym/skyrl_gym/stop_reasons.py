"""Why a turn or a trajectory ended."""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """Why a turn or a trajectory ended, with a sentence to display. Agents may add their own reasons as plain text.

    The first three belong to valid trajectories. All other reasons mark the trajectory invalid, and
    `Trajectory.error` has the details.

    >>> StopReason("length") is StopReason.LENGTH, StopReason.LENGTH == "length"
    (True, True)
    >>> StopReason.MAX_TURNS.sentence
    'It took generator.max_turns turns.'
    """

    sentence: str

    def __new__(cls, value: str, sentence: str) -> StopReason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member

    STOP = "stop", "The model ended its last turn, or the environment was done."
    LENGTH = "length", "The last turn, or the trajectory, reached its maximum number of tokens."
    MAX_TURNS = "max_turns", "It took generator.max_turns turns."
    ABORT = "abort", "The engine aborted a request."
    ENGINE_ERROR = "engine_error", "The engine failed."
    ENV_ERROR = "env_error", "The environment raised an error, or gave a reward that is NaN, infinite or too large."
    ENV_TIMEOUT = "env_timeout", "A call into the environment exceeded its time limit."
    ENV_CRASHED = "env_crashed", "The process of the environment crashed."
    REWARD_UNKNOWN = "reward_unknown", "The environment, a reward function or the agent could not grade the reply."
    PROMPT_TOO_LONG = "prompt_too_long", "The prompt is longer than the maximum input length."
    TRAJECTORY_TIMEOUT = "trajectory_timeout", "It took longer than generator.trajectory_timeout_seconds."
    STALLED = "stalled", "A wait exceeded trainer.watchdog.limit_seconds."
    EMPTY_RESPONSE = "empty_response", "The response has no token that could carry a reward."
    AGENT_ERROR = "agent_error", "The agent raised an error, or did not return a reward."
    AGENT_TIMEOUT = "agent_timeout", "The agent exceeded its time limit."
    AGENT_SILENT = "agent_silent", "The agent returned without calling the model."
