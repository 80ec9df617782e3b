"""`environment.*`: the tasks that give rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import ConfigDict, Field

from skyrl_train.config.base import FreeValue, Section, Text


class SkyRLGymConfig(Section):
    """Environment calls, plus one free section per environment class, handed to that environment as it is:
    `environment.skyrl_gym.search.topk=3` reaches an environment of class `search` as `{"topk": 3}`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, FreeValue]] = Field(init=False)

    max_env_workers: Annotated[int, Ge(0)] = 32
    """Threads that environment calls run in, or processes; 0 calls them inline, without a limit in time."""

    call_timeout_seconds: Annotated[float, Gt(0)] | None = 300.0
    """Time limit of a call into an environment. A call that exceeds it is abandoned, and its rollout is invalid
    (`env_timeout`); null waits forever."""

    isolation: Literal["thread", "process"] = "thread"
    """`process` runs each environment in a separate worker process, at most `max_env_workers` at once. Workers that
    hang are killed; a crash affects only its own environment. `thread` is faster, but a hanging call never ends."""

    python: Text | None = None
    """With `isolation=process`, the Python interpreter that environments run in; null takes the trainer's own."""

    def env_config(self, env_class: str) -> dict[str, Any]:
        """The free section of one environment class; empty where nothing was set."""
        return dict((self.model_extra or {}).get(env_class, {}))


class EnvironmentConfig(Section):
    """Which environment, and what it is given."""

    env_class: Text = "gsm8k"
    """Environment of the dataset rows that name none."""

    skyrl_gym: SkyRLGymConfig = SkyRLGymConfig()
    """Environment calls, plus one free section per environment class, handed to that environment as it is."""
