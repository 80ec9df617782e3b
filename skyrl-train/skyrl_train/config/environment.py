"""`environment.*`: the tasks that give rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import ConfigDict, Field

from skyrl_train.config.base import FreeValue, Section, Text


class SkyRLGymConfig(Section):
    """Environment calls, plus one free section per environment class that is passed to it unchanged:
    `environment.skyrl_gym.search.topk=3` reaches an environment of class `search` as `{"topk": 3}`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, FreeValue]] = Field(init=False)

    max_env_workers: Annotated[int, Ge(0)] = 32
    """Threads or processes for environment calls; 0 calls them inline, without a time limit."""

    call_timeout_seconds: Annotated[float, Gt(0)] | None = 300.0
    """Time limit of a call into an environment. A call that exceeds it is abandoned, and its rollout is invalid
    (`env_timeout`); null waits forever."""

    isolation: Literal["thread", "process"] = "thread"
    """`process` runs each environment in a separate worker process, at most `max_env_workers` at once. Workers that
    hang are killed; a crash affects only its own environment. `thread` is faster, but a hanging call never ends."""

    python: Text | None = None
    """With `isolation=process`, the Python interpreter of environments; null takes the trainer's."""

    def env_config(self, env_class: str) -> dict[str, Any]:
        """Return the free section of one environment class, which may be empty."""
        return dict((self.model_extra or {}).get(env_class, {}))


class EnvironmentConfig(Section):
    """The environment and its settings."""

    env_class: Text = "gsm8k"
    """Default environment of dataset rows."""

    skyrl_gym: SkyRLGymConfig = SkyRLGymConfig()
    """Environment calls, plus one free section per environment class."""
