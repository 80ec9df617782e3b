"""Reward functions that score finished rollouts: per group of samples, or for a whole batch.

    @register_reward_function("brevity")
    def brevity(samples):
        return [-0.001 * len(sample.response) for sample in samples]

`generator.reward_functions=[brevity]` adds this score times `generator.reward_weights.brevity` to the reward on each
trajectory's last sampled token, and logs the score as a reward component. None makes a sample invalid.

A plain function runs in a thread, one call at a time. An `async` function is awaited for all groups concurrently.
Neither has a time limit: a function that may hang must set its own, as `judge` does.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file

from skyrl_gym.runtime.env_pool import call_contained, errors_as_exceptions
from skyrl_gym.runtime.validation import is_reward
from skyrl_train.algorithms.filters import leave_out_truncated
from skyrl_train.algorithms.reward_pipeline import Reward, add_function_reward, zero_reward_on_non_stop
from skyrl_train.config.generator import GeneratorConfig, RewardModelConfig
from skyrl_train.config.policy import LoraConfig
from skyrl_train.dataset.supervised import build_rewarded_segment, build_supervised_batch
from skyrl_train.distributed import SingleStrategy
from skyrl_train.errors import ConfigError, EnvError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.media.processing import is_vision_model
from skyrl_train.media.spans import ImageSpan
from skyrl_train.models.loading import check_same_tokens, default_device, load_model
from skyrl_train.models.lora import adapter_role, read_config
from skyrl_train.types import DrawnPrompt, Segment, Trajectory
from skyrl_train.types.specs import LoraSpec, ModelSpec, World
from skyrl_train.watchdog import REWARD, Wait
from skyrl_train.workers.split import join, split
from skyrl_train.workers.worker import Worker

logger = logging.getLogger(__name__)

Level = Literal["group", "batch"]


@dataclass(frozen=True, slots=True)
class RewardSample:
    """A valid trajectory, as passed to reward functions."""

    trajectory: Trajectory
    prompt: str  # with special tokens, and one placeholder per image
    response: str  # of the last segment, likewise


RewardFunction = Callable[[Sequence[RewardSample]], Sequence[Reward | None] | Awaitable[Sequence[Reward | None]]]


@dataclass(frozen=True, slots=True)
class _Registered:
    function: RewardFunction
    level: Level


REWARD_FUNCTIONS: dict[str, _Registered] = {}

REWARD_MODEL, MODEL_KEY = "reward_model", "generator.reward_model.path"
"""Name of the function for `generator.reward_model`, and the key of the model's path."""


def register_reward_function(name: str, *, level: Level = "group") -> Callable[[RewardFunction], RewardFunction]:
    """Make a function available to `generator.reward_functions`. It returns one reward per sample.

    With `level="group"`, it receives the samples of one prompt. With `level="batch"`, it receives all samples that are
    played together: a drawn batch of prompts, an evaluation batch, or the greedy rollouts.

    Raises:
        ConfigError: the name is taken.
    """

    def decorator(function: RewardFunction) -> RewardFunction:
        if name in REWARD_FUNCTIONS or name == REWARD_MODEL:
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
    """Return a reward function that scores each sample with `ask`, e.g. a judge model behind an API.

    At most `max_concurrency` calls run at once, over all groups. A call that fails or exceeds `timeout_s` is retried up
    to `n_retries` times, after waits of `first_wait_s`, 2 × `first_wait_s`, 4 × `first_wait_s`, and so on. After that,
    the sample's reward is unknown.
    """
    semaphores: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def ask_with_retries(sample: RewardSample) -> float | None:
        loop = asyncio.get_running_loop()  # a semaphore belongs to one loop, but a process may run several in turn
        for closed in [other for other in semaphores if other.is_closed()]:
            del semaphores[closed]
        semaphore = semaphores.setdefault(loop, asyncio.Semaphore(max_concurrency))
        for attempt in range(n_retries + 1):
            try:
                async with semaphore, asyncio.timeout(timeout_s):
                    with errors_as_exceptions():
                        return await ask(sample)
            except Exception as error:  # noqa: BLE001, the boundary of a judge
                is_last = attempt == n_retries
                logger.log(
                    logging.WARNING if is_last else logging.INFO,
                    "A judge failed on %s, attempt %d of %d: %r",
                    *(sample.trajectory.id.to_string(), attempt + 1, n_retries + 1, error),
                )
                if not is_last:
                    await asyncio.sleep(first_wait_s * 2**attempt)
        return None

    async def reward(samples: Sequence[RewardSample]) -> list[Reward | None]:
        return await asyncio.gather(*map(ask_with_retries, samples))

    return reward


def functions_of_batches(cfg: GeneratorConfig) -> list[str]:
    """Return the names of configured reward functions with `level="batch"`."""
    known = [name for name in cfg.reward_functions if name in REWARD_FUNCTIONS]
    return [name for name in known if REWARD_FUNCTIONS[name].level == "batch"]


class RewardFunctions:
    """The configured reward functions and their weights."""

    def __init__(self, cfg: GeneratorConfig, chat: ChatEncoder) -> None:
        """Look up the functions. Raise ConfigError if a name is unknown or the reward model cannot be loaded."""
        self._functions = {name: REWARD_FUNCTIONS[name] for name in cfg.reward_functions if name in REWARD_FUNCTIONS}
        if cfg.reward_model.path is not None:
            self._functions[REWARD_MODEL] = _Registered(RewardModel(cfg.reward_model, chat.tokenizer), "batch")
        for name in cfg.reward_functions:
            if name not in self._functions:
                known = ", ".join(sorted(REWARD_FUNCTIONS)) or "none"
                raise ConfigError(f"generator.reward_functions={name!r} is not registered; available: {known}")
        self._cfg = cfg
        self._weights = cfg.reward_weights
        self._chat = chat
        self._unused: set[str] = set()  # weights that were logged as unused
        self._locks = {name: asyncio.Lock() for name in self._functions}

    async def add_to(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Add all rewards to the valid trajectories, then apply the configured rules for truncated replies."""
        for name in self._functions:
            trajectories = await self._add(name, trajectories)
        reported = {name for t in trajectories for name in t.reward_components}
        unused = self._weights.keys() - reported - self._unused
        if unused and any(t.is_valid for t in trajectories):  # a name may be mistyped
            self._unused |= unused
            logger.warning(
                "generator.reward_weights lists %s, which none of %d trajectories reports; they report %s",
                *(", ".join(sorted(unused)), len(trajectories), ", ".join(sorted(reported)) or "no components"),
            )
        if self._cfg.zero_reward_on_non_stop:
            trajectories = zero_reward_on_non_stop(trajectories)
        if self._cfg.apply_overlong_filtering:
            trajectories = leave_out_truncated(trajectories)
        return trajectories

    async def _add(self, name: str, trajectories: list[Trajectory]) -> list[Trajectory]:
        registered, lock = self._functions[name], self._locks[name]
        valid = [i for i, t in enumerate(trajectories) if t.is_valid]
        groups: list[list[int]] = [valid] if valid else []
        if registered.level == "group":
            ids = [t.id for t in trajectories]
            groups = [list(group) for _, group in groupby(valid, key=lambda i: (ids[i].draw, ids[i].instance_id))]
        rewards = await asyncio.gather(
            *(self._score(name, registered.function, [trajectories[i] for i in group], lock) for group in groups)
        )
        for group, group_rewards in zip(groups, rewards, strict=True):
            for i, reward in zip(group, group_rewards, strict=True):
                trajectories[i] = add_function_reward(trajectories[i], name, reward, self._weights.get(name, 1.0))
        return trajectories

    async def _score(
        self, name: str, function: RewardFunction, trajectories: Sequence[Trajectory], lock: asyncio.Lock
    ) -> Sequence[Reward | None]:
        """Return one reward per trajectory. If the function fails, all are unknown."""
        samples = [self._sample(t) for t in trajectories]
        try:
            with errors_as_exceptions():
                result: Any
                waiting = Wait(REWARD, name, f"{len(samples)} samples")  # not for the lock
                if is_async(function):
                    result = function(samples)
                else:
                    async with lock:  # a plain function may block and need not be thread-safe
                        with waiting:
                            result = await asyncio.to_thread(call_contained, function, samples)
                if inspect.isawaitable(result):
                    with waiting:
                        result = await result
                return _check_rewards(result, trajectories)
        except Exception:  # the boundary of a user's function
            logger.warning("Reward function %s failed on %d samples", name, len(samples), exc_info=True)
            return [None] * len(samples)

    def _sample(self, trajectory: Trajectory) -> RewardSample:
        """Decode the last segment, with the first of the placeholder tokens of each image."""
        segment = trajectory.segments[-1]

        def mark(span: ImageSpan) -> str:
            return self._chat.decode_all(segment.token_ids[span.start : span.start + 1])

        n_prompt, n_tokens = segment.n_prompt, len(segment.token_ids)
        texts = [self._chat.decode_segment(segment, *ends, mark) for ends in ((0, n_prompt), (n_prompt, n_tokens))]
        return RewardSample(trajectory, *texts)


class RewardModel:
    """A sequence-classification model in this process. Its reward head reads a rollout's last token.

    It scores sampled tokens, so it must have the policy's tokenizer. If a rollout's history was rewritten, only the
    last row is scored. The path may be an adapter from `skyrl reward`, to apply to its base model.
    """

    def __init__(self, cfg: RewardModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the model. Raise ConfigError if there is none, or if its tokenizer differs."""
        assert cfg.path is not None, f"{MODEL_KEY} is not set"
        device, lora = default_device(), _find_adapter(cfg.path)
        path = cfg.path if lora is None else lora.base_path
        check_same_tokens(cfg.path, MODEL_KEY, tokenizer, base_path=path)
        if is_vision_model(tokenizer.name_or_path) and not is_vision_model(path):
            raise ConfigError(
                f"{MODEL_KEY}={cfg.path} reads only text, but the policy reads images; use a vision-language reward "
                "model"
            )
        load = partial(
            load_model,
            path,
            "reward",
            dtype=getattr(torch, cfg.dtype),
            device=device,
            key=MODEL_KEY if lora is None else f"{MODEL_KEY}={cfg.path} with base_model_name_or_path",
            pad_token_id=None if lora is None else tokenizer.pad_token_id,
        )
        spec = ModelSpec(
            "reward", load, tokenizer.save_pretrained, lora=lora, max_tokens_per_micro_batch=cfg.max_tokens_per_batch
        )
        self._worker = Worker(spec, SingleStrategy(World(device=str(device))))
        self._max_tokens = cfg.max_tokens_per_batch
        config = self._worker.module.hf_model.config.get_text_config()
        self._pad_token_id: int | None = config.pad_token_id
        self._context_length: int | None = getattr(config, "max_position_embeddings", None)

    def __call__(self, samples: Sequence[RewardSample]) -> list[float | None]:
        """Return the reward of each sample, or None for samples longer than the model's context."""
        rows = [sample.trajectory.segments[-1] for sample in samples]
        fits = [i for i, row in enumerate(rows) if len(row.token_ids) <= (self._context_length or math.inf)]
        rewards: list[float | None] = [None] * len(samples)
        if fits:
            scores = self.score([rows[i] for i in fits])
            for i, score in zip(fits, scores, strict=True):
                rewards[i] = score
        return rewards

    def score(self, rows: Sequence[Segment]) -> list[float]:
        """Return one reward per row."""
        segments = [build_rewarded_segment(row.token_ids, self._pad_token_id, row.images) for row in rows]
        batch = build_supervised_batch([DrawnPrompt(i, ((s,),), i) for i, s in enumerate(segments)], pad_token_id=0)
        shards, order = split(batch, 1, self._max_tokens, shares_prefixes=self._worker.module.shares_prefixes)
        values = join(order, [self._worker.score(shard) for shard in shards], len(batch))["values"]  # (B, 1)
        return [float(value) for value in values[:, 0]]


def _find_adapter(path: str) -> LoraSpec | None:
    """Return the specification of the adapter at `path`, or None if there is a full model.

    Raise ConfigError if the adapter has no reward head, or does not name its base model.
    """
    if find_adapter_config_file(path) is None:
        return None
    config = read_config(path, f"{MODEL_KEY}={path}")
    if adapter_role(config) != "reward" or not config.modules_to_save:
        raise ConfigError(
            f"{MODEL_KEY}={path} is an adapter without a reward head; use one that `skyrl reward` has trained"
        )
    if config.base_model_name_or_path is None:
        raise ConfigError(
            f"{MODEL_KEY}={path} is an adapter that does not name its base model; merge both with `skyrl merge adapter "
            f"{path} TARGET_DIR --base MODEL`, and use TARGET_DIR"
        )
    return LoraSpec(LoraConfig(lora_path=path), "generator.reward_model", config.base_model_name_or_path)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if calling the function returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _check_rewards(rewards: Any, trajectories: Sequence[Trajectory]) -> Sequence[Reward | None]:
    if len(rewards) != len(trajectories):
        raise EnvError(f"it returned {len(rewards)} rewards for {len(trajectories)} samples; return one for each")
    for reward, t in zip(rewards, trajectories, strict=True):
        values = reward if isinstance(reward, list) else [] if reward is None else [reward]
        if values and not is_reward(values):
            raise EnvError(f"it returned {reward!r}; rewards are finite numbers, or None where they are unknown")
        if isinstance(reward, list) and len(reward) != len(t.response_ids):
            raise EnvError(f"it returned {len(reward)} rewards for a response of {len(t.response_ids)} tokens")
    return [[float(value) for value in r] if isinstance(r, list) else r if r is None else float(r) for r in rewards]
