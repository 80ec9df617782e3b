"""The agent loop: an environment and a model take turns until the environment says it is done.

    open → make → init → generate → step → generate → step → … → get_metrics → close

Each rollout is alone. What its environment does, or the engine, ends this rollout as invalid and no other; first it is
tried again with a fresh environment.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_gym.contract import checked_metrics, checked_output, checked_prompt, reward_components
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_train.config.environment import SkyRLGymConfig
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import EngineError
from skyrl_train.generators.answers import (
    UnknownReward,
    turn_reward,
    weighted_reward,
)
from skyrl_train.generators.attempts import play_until_valid
from skyrl_train.generators.base import (
    BatchMetadata,
    GeneratorInterface,
    RolloutRequest,
)
from skyrl_train.generators.chat_template import ChatEncoder, custom_chat_template
from skyrl_train.generators.conversation import conversation_class
from skyrl_train.generators.env_pool import LocalEpisodes
from skyrl_train.generators.env_processes import ProcessEpisodes
from skyrl_train.generators.episodes import EnvCrashed, EnvTimeout, Episodes
from skyrl_train.generators.rewards import RewardFunctions
from skyrl_train.generators.rollout import Rollout, TurnRecord
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, InferenceEngine, SamplingParams
from skyrl_train.types import Trajectory

logger = logging.getLogger(__name__)

FAILURES: tuple[tuple[type[BaseException], str], ...] = (
    (EnvTimeout, "env_timeout"),
    (EnvCrashed, "env_crashed"),
    (UnknownReward, "reward_unknown"),
)
"""Stop reasons of what can go wrong in an environment; anything else is `env_error`."""


class SkyRLGymGenerator(GeneratorInterface):
    """Plays `skyrl_gym` environments with an inference engine.

    With `generator.batched` all rollouts of a call take their turns together; otherwise, and where environments
    have processes of their own, each goes at its own pace and the engine batches whatever is waiting. The rollouts
    themselves are the same.

    A subclass overrides `rollout`, or `generate` for SkyRL's parallel lists. It finds `generator_cfg`,
    `inference_engine_client` and `tokenizer` here.
    """

    def __init__(
        self,
        generator_cfg: GeneratorConfig,
        skyrl_gym_cfg: SkyRLGymConfig,
        inference_engine_client: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str | None = None,
    ) -> None:
        """`model_name` is for callers that know the engine by name; one engine needs none."""
        self.generator_cfg = generator_cfg
        self.inference_engine_client = inference_engine_client
        self.tokenizer = tokenizer
        template = custom_chat_template(generator_cfg.chat_template)
        self._chat = ChatEncoder(tokenizer, template, generator_cfg.chat_template_kwargs)
        self._converse = conversation_class(generator_cfg, self._chat)
        self._rewards = RewardFunctions(generator_cfg, self._chat)
        is_apart = skyrl_gym_cfg.isolation == "process"
        self._episodes: Episodes = ProcessEpisodes(skyrl_gym_cfg) if is_apart else LocalEpisodes(skyrl_gym_cfg)
        self._is_in_step = generator_cfg.batched and not is_apart  # a group that waits for its own processes never ends
        longest = inference_engine_client.info.context_length - 1  # leaves room for a token
        self._max_input_length = min(generator_cfg.max_input_length or longest, longest)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises TypeError for a subclass that overrides what this class does not have."""
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "agent_loop"):
            raise TypeError(
                f"{cls.__name__}.agent_loop would never be called: this generator has no such method. Override "
                "generate(input_batch), or rollout(requests, sampling, metadata), and play the episodes there"
            )

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """See `GeneratorInterface.rollout`. A rollout that fails comes back invalid, never as reward 0."""
        play = partial(self._play_all, sampling)
        rollouts = await play_until_valid(requests, metadata, play, n_retries=self.generator_cfg.n_rollout_retries)
        return await self._rewards.add_to([rollout.trajectory() for rollout in rollouts])

    async def close(self) -> None:
        """See `GeneratorInterface.close`: no thread and no process is left."""
        await self._episodes.close()

    async def _play_all(self, sampling: SamplingParams, rollouts: Sequence[Rollout]) -> None:
        groups = [rollouts] if self._is_in_step else [[rollout] for rollout in rollouts]
        await _all_or_cancel(self._play(group, sampling) for group in groups)

    async def _play(self, rollouts: Sequence[Rollout], sampling: SamplingParams) -> None:
        """Play rollouts turn by turn, all of them in step. Time runs once their environments have a place."""
        try:
            await _all_or_cancel(self._open(rollout) for rollout in rollouts)
            async with asyncio.timeout(self.generator_cfg.trajectory_timeout_seconds):
                await _all_or_cancel(self._start(rollout) for rollout in rollouts if not rollout.is_over)
                while active := [rollout for rollout in rollouts if not rollout.is_over]:
                    await _all_or_cancel(self._take_turn(rollout, sampling) for rollout in active)
        except TimeoutError:
            seconds = self.generator_cfg.trajectory_timeout_seconds
            for rollout in rollouts:
                if not rollout.is_over:
                    rollout.fail("trajectory_timeout", f"it was not over after {seconds:g} s")
        finally:
            await _all_or_cancel(self._finish(rollout) for rollout in rollouts)

    async def _open(self, rollout: Rollout) -> None:
        with _boundary(rollout, "init"):
            rollout.episode = await self._episodes.open()

    async def _start(self, rollout: Rollout) -> None:
        """Make the environment and encode its first prompt."""
        row, episode = rollout.request.row, rollout.episode
        assert episode is not None
        extras = copy.deepcopy(row.env_extras)
        extras["max_turns"] = self.generator_cfg.max_turns
        with _boundary(rollout, "init"):
            await episode.make(rollout.env_class, extras)
            prompt = checked_prompt(await episode.init(copy.deepcopy([*map(dict, row.prompt)])))
            rollout.conversation = self._converse(prompt)
            n_tokens = len(rollout.conversation.next_prompt())
            if n_tokens > self._max_input_length:
                reason = f"the prompt has {n_tokens} tokens and the limit is {self._max_input_length}"
                rollout.fail("prompt_too_long", reason)

    async def _take_turn(self, rollout: Rollout, sampling: SamplingParams) -> None:
        """Sample a turn, let the environment answer, and add its observations."""
        conversation, episode = rollout.conversation, rollout.episode
        assert conversation is not None
        assert episode is not None
        prompt_ids = conversation.next_prompt()
        with _boundary(rollout, "generate"):
            result, text = await self._sample(rollout, prompt_ids, sampling)
            rollout.turns.append(TurnRecord(result, len(prompt_ids)))
            conversation.add_turn(result, text)
            if result.stop_reason == "abort":
                rollout.fail("abort", "the engine was told to abort it")
        if rollout.is_over:
            return
        started = time.perf_counter()
        with _boundary(rollout, "step"):
            output = checked_output(await episode.step(text))
            self._take_answer(rollout, output, text)
        rollout.env_s += time.perf_counter() - started

    async def _sample(
        self, rollout: Rollout, prompt_ids: list[int], sampling: SamplingParams
    ) -> tuple[EngineResult, str]:
        """The model's turn and its text, within what is left of the trajectory's budget.

        Raises:
            EngineError: whatever went wrong.
        """
        if (budget := self.generator_cfg.max_response_length) is not None:
            n_left = budget - rollout.n_response_tokens
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, n_left))
        request = EngineRequest(prompt_ids, sampling, rollout.seed, rollout.session_id)
        started = time.perf_counter()
        try:
            (result,) = await self.inference_engine_client.generate([request])
            text = self._chat.decode(result.token_ids)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"generation failed with {type(error).__name__}: {error}") from error
        rollout.generate_s += time.perf_counter() - started
        return result, text

    def _take_answer(self, rollout: Rollout, output: BaseTextEnvStepOutput, text: str) -> None:
        """Note the reward of the last turn, and go on with what the environment says, or end."""
        conversation, record = rollout.conversation, rollout.turns[-1]
        assert conversation is not None
        components = reward_components(output)
        reward = turn_reward(output, len(record.result.token_ids))
        record.reward = weighted_reward(reward, components, self.generator_cfg.reward_weights)
        for name, value in components.items():
            rollout.reward_components[name] = rollout.reward_components.get(name, 0.0) + value
        action = output.get("postprocessed_action")
        if action is not None and action != text:
            conversation.replace_turn(action)
        if output["done"]:
            rollout.stop_reason = record.result.stop_reason
            return
        if len(rollout.turns) >= self.generator_cfg.max_turns:
            rollout.stop_reason = "max_turns"
            return
        observations = self._with_status(rollout, output["observations"])
        history = (output.get("metadata") or {}).get("modified_chat_history")
        if history is None:
            conversation.observe(observations, was_stopped=record.result.stop_reason == "stop")
        else:
            conversation.replace_history([*history, *observations])
        if len(conversation.next_prompt()) > self._max_input_length or self._is_spent(rollout):
            rollout.stop_reason = "length"

    def _is_spent(self, rollout: Rollout) -> bool:
        budget = self.generator_cfg.max_response_length
        return budget is not None and rollout.n_response_tokens >= budget

    def _with_status(self, rollout: Rollout, observations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With a line on what is left of the context and of the turns, where that is asked for."""
        if not self.generator_cfg.inject_context_status or not observations:
            return observations
        assert rollout.conversation is not None
        n_tokens, n_most = len(rollout.conversation.next_prompt()), self._max_input_length
        context = f"Context: {n_tokens}/{n_most} tokens ({round(100 * n_tokens / n_most)}%)"
        status = f"[{context}, Turn {len(rollout.turns)}/{self.generator_cfg.max_turns}]"
        last = observations[-1]
        return [*observations[:-1], {**last, "content": f"{last['content']}\n{status}"}]

    async def _finish(self, rollout: Rollout) -> None:
        """Collect the environment's metrics, close it, and free the engine's cache of the conversation."""
        await self.inference_engine_client.end_session(rollout.session_id)
        episode = rollout.episode
        if episode is None:
            return
        if rollout.is_over and rollout.error is None:  # one that is cancelled may be in the middle of a call
            with _boundary(rollout, "get_metrics"):
                rollout.env_metrics = checked_metrics(await episode.get_metrics())
        try:
            await episode.close()
        except Exception:  # what it was good for is over: the rollout stays what it is
            logger.warning("%s.close failed after rollout %s", rollout.env_class, rollout.request.id, exc_info=True)


@contextmanager
def _boundary(rollout: Rollout, method: str) -> Iterator[None]:
    """What goes wrong in a rollout ends it as invalid, and no other."""
    try:
        yield
    except EngineError as error:
        rollout.fail("engine_error", str(error), error)
    except Exception as error:  # noqa: BLE001, the boundary of a rollout
        stop_reason = next((reason for kind, reason in FAILURES if isinstance(error, kind)), "env_error")
        rollout.fail(stop_reason, f"{rollout.env_class}.{method} raised {type(error).__name__}: {error}", error)


async def _all_or_cancel(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently, the first error cancels the rest; a single one is just awaited."""
    listed = list(coroutines)
    if len(listed) == 1:
        await listed[0]
        return
    async with asyncio.TaskGroup() as tasks:
        for coroutine in listed:
            tasks.create_task(coroutine)
