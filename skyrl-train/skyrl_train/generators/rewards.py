"""Rewards that no environment gives by itself: functions of finished rollouts, alone, by group, or by batch.

    @register_reward_function("brevity")
    def brevity(samples):
        return [-0.001 * len(sample.response) for sample in samples]

`generator.reward_functions=[brevity]` adds it to the reward of each trajectory's last token, times
`generator.reward_weights.brevity`, and logs it as a component of the reward. None for a sample makes it invalid.

A plain function runs in a thread, one call at a time; an `async` one is awaited, for all groups at once. Neither has a
limit in time: what may hang sets its own, as `judge` does.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from skyrl_gym.contract import is_reward
from skyrl_train.algorithms.filters import leave_out_truncated, zero_reward_on_non_stop
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import ConfigError, EnvError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.types import Trajectory, last_sampled

logger = logging.getLogger(__name__)

Level = Literal["group", "batch"]
Reward = float | list[float] | None
"""For the trajectory, for each token of its response, or None: it cannot be told."""


@dataclass(frozen=True, slots=True)
class RewardSample:
    """A valid trajectory as a reward function sees it."""

    trajectory: Trajectory
    prompt: str  # with special tokens
    response: str  # likewise, of the last row


RewardFunction = Callable[[Sequence[RewardSample]], Sequence[Reward] | Awaitable[Sequence[Reward]]]


@dataclass(frozen=True, slots=True)
class _Registered:
    function: RewardFunction
    level: Level


REWARD_FUNCTIONS: dict[str, _Registered] = {}


def register_reward_function(name: str, *, level: Level = "group") -> Callable[[RewardFunction], RewardFunction]:
    """Make a function available to `generator.reward_functions`.

    It is called, or awaited, with the samples of one prompt (`group`), or with all that are played together (`batch`: a
    batch of prompts that was drawn, one of an evaluation, the greedy rollouts), and returns a reward for each.

    Raises:
        ConfigError: the name is taken.
    """

    def decorator(function: RewardFunction) -> RewardFunction:
        if name in REWARD_FUNCTIONS:
            raise ConfigError(f"reward function {name!r} is already registered; choose another name")
        REWARD_FUNCTIONS[name] = _Registered(function, level)
        return function

    return decorator


def judge(
    ask: Callable[[RewardSample], Awaitable[float | None]],
    *,
    max_concurrency: int = 8,
    n_retries: int = 2,
    timeout_s: float = 60.0,
    first_wait_s: float = 1.0,
) -> RewardFunction:
    """A reward function that asks about each sample by itself, a judge model behind an API for example.

    At most `max_concurrency` questions are open at once, those of all groups together. One that fails, or takes longer
    than `timeout_s`, is asked again `n_retries` times, after `first_wait_s`, then twice as long, …; then the sample's
    reward is unknown.
    """
    semaphores: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def reward(samples: Sequence[RewardSample]) -> list[Reward]:
        free = _of_this_loop(semaphores, max_concurrency)

        async def patiently(sample: RewardSample) -> float | None:
            for attempt in range(n_retries + 1):
                try:
                    async with free, asyncio.timeout(timeout_s):
                        return await ask(sample)
                except Exception as error:  # noqa: BLE001, the boundary of a question
                    last = attempt == n_retries
                    logger.log(
                        logging.WARNING if last else logging.INFO,
                        "A judge failed on %s, attempt %d of %d: %r",
                        *(sample.trajectory.id.to_string(), attempt + 1, n_retries + 1, error),
                    )
                    if not last:
                        await asyncio.sleep(first_wait_s * 2**attempt)
            return None

        return await asyncio.gather(*(patiently(sample) for sample in samples))

    return reward


def _of_this_loop(
    semaphores: dict[asyncio.AbstractEventLoop, asyncio.Semaphore], max_concurrency: int
) -> asyncio.Semaphore:
    """A semaphore belongs to one event loop, and a process may have several, one after the other."""
    for closed in [loop for loop in semaphores if loop.is_closed()]:
        del semaphores[closed]
    return semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(max_concurrency))


class RewardFunctions:
    """The functions that a run has chosen, and their weights."""

    def __init__(self, cfg: GeneratorConfig, chat: ChatEncoder) -> None:
        """Raises ConfigError for a name that is not registered."""
        for name in cfg.reward_functions:
            if name not in REWARD_FUNCTIONS:
                known = ", ".join(sorted(REWARD_FUNCTIONS)) or "none"
                raise ConfigError(f"generator.reward_functions={name!r} is not registered; available: {known}")
        self._cfg = cfg
        self._weights = cfg.reward_weights
        self._chat = chat
        self._unused: set[str] = set()  # weights that the log has named

    async def add_to(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """The trajectories with what every function says of the valid ones.

        Then follow the configuration's own rules for replies that did not end by themselves.
        """
        for name in self._cfg.reward_functions:
            trajectories = await self._add(name, trajectories)
        self._report_unused_weights(trajectories)
        if self._cfg.zero_reward_on_non_stop:
            trajectories = zero_reward_on_non_stop(trajectories)
        if self._cfg.apply_overlong_filtering:
            trajectories = leave_out_truncated(trajectories)
        return trajectories

    async def _add(self, name: str, trajectories: list[Trajectory]) -> list[Trajectory]:
        registered = REWARD_FUNCTIONS[name]
        valid = [i for i, t in enumerate(trajectories) if t.is_valid]
        groups: list[list[int]] = [valid] if valid else []
        if registered.level == "group":
            groups = [list(group) for _, group in groupby(valid, key=lambda i: trajectories[i].id.instance_id)]
        one_at_a_time = asyncio.Lock()
        rewards = await asyncio.gather(
            *(self._ask(name, registered.function, [trajectories[i] for i in group], one_at_a_time) for group in groups)
        )
        for group, of_group in zip(groups, rewards, strict=True):
            for i, reward in zip(group, of_group, strict=True):
                trajectories[i] = _with_reward(trajectories[i], name, reward, self._weights.get(name, 1.0))
        return trajectories

    async def _ask(
        self, name: str, function: RewardFunction, trajectories: Sequence[Trajectory], one_at_a_time: asyncio.Lock
    ) -> Sequence[Reward]:
        """One reward for each; all unknown when the function fails."""
        samples = [
            RewardSample(t, self._chat.decode_all(t.prompt_ids), self._chat.decode_all(t.response_ids))
            for t in trajectories
        ]
        try:
            return _checked(await _answer(function, samples, one_at_a_time), trajectories)
        except Exception:  # the boundary of a user's function: its samples have no reward
            logger.warning("Reward function %s failed on %d samples", name, len(samples), exc_info=True)
            return [None] * len(samples)

    def _report_unused_weights(self, trajectories: Sequence[Trajectory]) -> None:
        """Name, once, the weights of components that no trajectory reports: their names may be mistyped."""
        reported = {name for t in trajectories for name in t.reward_components}
        unused = self._weights.keys() - reported - self._unused
        if unused and any(t.is_valid for t in trajectories):
            self._unused |= unused
            logger.warning(
                "generator.reward_weights names %s, which none of %d trajectories reports; they report %s",
                *(", ".join(sorted(unused)), len(trajectories), ", ".join(sorted(reported)) or "no components"),
            )


async def _answer(function: RewardFunction, samples: Sequence[RewardSample], one_at_a_time: asyncio.Lock) -> Any:
    """What the function returns. A plain one may block, and need not be thread-safe."""
    answer: Any
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        answer = function(samples)
    else:
        async with one_at_a_time:
            answer = await asyncio.to_thread(function, samples)
    return await answer if inspect.isawaitable(answer) else answer


def _checked(rewards: Any, trajectories: Sequence[Trajectory]) -> Sequence[Reward]:
    if len(rewards) != len(trajectories):
        raise EnvError(f"it returned {len(rewards)} rewards for {len(trajectories)} samples; return one for each")
    for reward, t in zip(rewards, trajectories, strict=True):
        values = reward if isinstance(reward, list) else [] if reward is None else [reward]
        if values and not is_reward(values):
            raise EnvError(f"it returned {reward!r}; rewards are finite numbers, or None where they are unknown")
        if isinstance(reward, list) and len(reward) != len(t.response_ids):
            raise EnvError(f"it returned {len(reward)} rewards for a response of {len(t.response_ids)} tokens")
    return [[float(value) for value in r] if isinstance(r, list) else r if r is None else float(r) for r in rewards]


def _with_reward(trajectory: Trajectory, name: str, reward: Reward, weight: float) -> Trajectory:
    """Return the trajectory with one more component of its reward."""
    if reward is None:
        error = f"reward function {name} does not know its reward"
        return replace(trajectory, stop_reason="reward_unknown", error=error)
    last = trajectory.segments[-1]
    rewards = list(last.rewards)
    if isinstance(reward, list):
        rewards = [old + weight * value for old, value in zip(rewards, reward, strict=True)]
    elif rewards:
        rewards[last_sampled(last.loss_mask)] += weight * reward
    total = sum(reward) if isinstance(reward, list) else reward
    segments = (*trajectory.segments[:-1], replace(last, rewards=rewards))
    return replace(trajectory, segments=segments, reward_components={**trajectory.reward_components, name: total})
