"""The agent loop: an environment and a model take turns until the environment is done.

    open → make → init → generate → step → generate → step → … → get_metrics → close

If an environment or the engine fails, only that rollout becomes invalid. It is then retried with a fresh environment.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_gym.error import EnvCrashed, EnvTimeout
from skyrl_gym.runtime.env_pool import LocalEpisodes
from skyrl_gym.runtime.env_processes import ProcessEpisodes
from skyrl_gym.runtime.text import describe_error
from skyrl_gym.runtime.validation import (
    reward_components,
    validate_metrics,
    validate_prompt,
    validate_reward,
    validate_step_output,
)
from skyrl_train.algorithms.reward_pipeline import Reward, add_final_reward, weigh_components
from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.root import SkyRLGymConfig
from skyrl_train.errors import EngineError, EnvError, OutOfMemoryError, StalledError
from skyrl_train.generators.base import BatchMetadata, RolloutGenerator, RolloutRequest
from skyrl_train.generators.chat_template import MAX_CHARS_PER_TOKEN, ChatEncoder, cannot_fit, load_chat_template
from skyrl_train.generators.conversation import TokenConversation, conversation_factory
from skyrl_train.generators.rewards import RewardFunctions
from skyrl_train.generators.rollout import Rollout, play_until_valid
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, InferenceEngine, SamplingParams
from skyrl_train.types import StopReason, Trajectory
from skyrl_train.watchdog import ENGINE, ENVIRONMENT, SLOT, Wait

logger = logging.getLogger(__name__)


class UnknownReward(EnvError):
    """An environment could not grade a reply."""


STOP_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (StalledError, StopReason.STALLED),
    (EngineError, StopReason.ENGINE_ERROR),
    (EnvTimeout, StopReason.ENV_TIMEOUT),
    (EnvCrashed, StopReason.ENV_CRASHED),
    (UnknownReward, StopReason.REWARD_UNKNOWN),
    (Exception, StopReason.ENV_ERROR),
)
"""Stop reason for each error class of a failed rollout. The first match counts."""


class GymGenerator(RolloutGenerator):
    """A generator that plays `skyrl_gym` environments with an inference engine.

    With `generator.batched`, all rollouts of a call take their turns together. Otherwise, and always with
    `isolation=process`, each rollout proceeds at its own pace, and the engine batches concurrent requests. Both modes
    give the same trajectories.

    Subclasses may override `rollout` and use `generator_cfg`, `inference_engine_client` and `tokenizer`.
    """

    def __init__(
        self,
        generator_cfg: GeneratorConfig,
        skyrl_gym_cfg: SkyRLGymConfig,
        inference_engine_client: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Create the generator."""
        self.generator_cfg = generator_cfg
        self.inference_engine_client = inference_engine_client
        self.tokenizer = tokenizer
        template = load_chat_template(generator_cfg.chat_template)
        self._chat = ChatEncoder(tokenizer, template, generator_cfg.chat_template_kwargs)
        self._new_conversation = conversation_factory(generator_cfg, self._chat)
        self._rewards = RewardFunctions(generator_cfg, self._chat)
        self._gym_cfg, in_processes = skyrl_gym_cfg, skyrl_gym_cfg.isolation == "process"
        limits = (skyrl_gym_cfg.max_env_workers, skyrl_gym_cfg.call_timeout_seconds)
        self._episodes = ProcessEpisodes(*limits, skyrl_gym_cfg.python) if in_processes else LocalEpisodes(*limits)
        # with max_env_workers=0, calls block the event loop, which only the watchdog can end
        self._env_limit_s = limits[1] if in_processes or limits[0] else None
        # Batched groups would deadlock: each holds some of the limited processes while it waits for more.
        self._is_batched = generator_cfg.batched and not in_processes
        max_length = inference_engine_client.info.context_length - 1  # leaves room for a token
        self._max_input_length = min(generator_cfg.max_input_length or max_length, max_length)
        self._max_chars = MAX_CHARS_PER_TOKEN * self._max_input_length

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """Return one trajectory per request, in order. Failed rollouts are marked invalid instead of scored 0."""

        async def play(rollouts: Sequence[Rollout]) -> None:
            groups = [rollouts] if self._is_batched else [[rollout] for rollout in rollouts]
            await gather_or_cancel(self._play(group, sampling) for group in groups)

        trajectories = await play_until_valid(requests, metadata, play, n_retries=self.generator_cfg.n_rollout_retries)
        return await self._rewards.add_to(trajectories)

    async def close(self) -> None:
        """End all threads and processes of environments."""
        await self._episodes.close()

    async def _play(self, rollouts: Sequence[Rollout], sampling: SamplingParams) -> None:
        """Play rollouts together, turn by turn. Their time limit starts once every environment has a slot."""
        limit_s = self.generator_cfg.trajectory_timeout_seconds
        try:
            await gather_or_cancel(self._open(rollout) for rollout in rollouts)
            async with asyncio.timeout(limit_s):
                await gather_or_cancel(self._start(rollout) for rollout in rollouts if not rollout.is_over)
                while active := [rollout for rollout in rollouts if not rollout.is_over]:
                    await gather_or_cancel(self._take_turn(rollout, sampling) for rollout in active)
        except TimeoutError:
            for rollout in rollouts:
                if not rollout.is_over:
                    rollout.fail(StopReason.TRAJECTORY_TIMEOUT, f"it was not over after {limit_s:g} s")
        finally:
            await gather_or_cancel(self._finish(rollout) for rollout in rollouts)

    async def _open(self, rollout: Rollout) -> None:
        with _Boundary(SLOT, rollout, "open"):
            rollout.episode = await self._episodes.open()

    async def _start(self, rollout: Rollout) -> None:
        """Make the environment and encode its first prompt."""
        row, episode = rollout.request.row, rollout.episode
        assert episode is not None
        with _Boundary(ENVIRONMENT, rollout, "init", self._env_limit_s):
            extras = copy.deepcopy(row.env_extras)
            extras["max_turns"] = self.generator_cfg.max_turns
            extras["reads_images"] = self.inference_engine_client.info.reads_images
            env_config: Any = self._gym_cfg.env_config(rollout.env_class)
            if self._gym_cfg.isolation == "thread":  # a process receives plain values
                env_config = OmegaConf.create(env_config)
            await episode.make(rollout.env_class, env_config, extras)
            prompt = validate_prompt(await episode.call("init", copy.deepcopy([*map(dict, row.prompt)])))
            if cannot_fit(prompt, self._max_input_length):
                rollout.fail(StopReason.PROMPT_TOO_LONG, f"the prompt has more than {self._max_chars:,} characters")
                return
            rollout.conversation = self._new_conversation(prompt)
            n_tokens = len(rollout.conversation.next_prompt())
            if n_tokens > self._max_input_length:
                reason = f"the prompt has {n_tokens} tokens, but the limit is {self._max_input_length}"
                rollout.fail(StopReason.PROMPT_TOO_LONG, reason)

    async def _take_turn(self, rollout: Rollout, sampling: SamplingParams) -> None:
        """Sample a turn, step the environment, and add its observations."""
        conversation, episode = rollout.conversation, rollout.episode
        assert conversation is not None
        assert episode is not None
        with _Boundary(ENGINE, rollout, "generate"):
            result, text = await self._sample(rollout, conversation, sampling)
            conversation.add_turn(result, text)
            if result.stop_reason == "abort":
                rollout.fail(StopReason.ABORT, "the engine aborted the request")
        if rollout.is_over:
            return
        started = time.perf_counter()
        with _Boundary(ENVIRONMENT, rollout, "step", self._env_limit_s):
            output = validate_step_output(await episode.call("step", text))
            self._apply_step(rollout, conversation, output, text)
            if rollout.is_over and not output["done"]:  # the episode was cut off, so grade what there is
                with _Boundary(ENVIRONMENT, rollout, "grade_unfinished", self._env_limit_s):
                    reward = validate_reward(await episode.call("grade_unfinished"), "grade_unfinished")
                    if reward is None:
                        raise UnknownReward("grade_unfinished() returned None: the reward is unknown")
                    add_final_reward(rollout.turns[-1], reward)
        rollout.env_s += time.perf_counter() - started

    async def _sample(
        self, rollout: Rollout, conversation: TokenConversation, sampling: SamplingParams
    ) -> tuple[EngineResult, str]:
        """Sample a turn within the trajectory's remaining token budget. Return it with its text."""
        if (budget := self.generator_cfg.max_response_length) is not None:
            n_left = budget - conversation.n_response_tokens
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, n_left))
        prompt_ids, images = conversation.next_prompt(), conversation.images
        request = EngineRequest(prompt_ids, sampling, rollout.seed, rollout.session_id, images)
        started = time.perf_counter()
        try:
            (result,) = await self.inference_engine_client.generate([request])
            text = self._chat.decode(result.token_ids)
        except (EngineError, OutOfMemoryError):
            raise
        except Exception as error:
            raise EngineError(f"generation failed with {describe_error(error)}") from error
        rollout.generate_s += time.perf_counter() - started
        return result, text

    def _apply_step(
        self, rollout: Rollout, conversation: TokenConversation, output: BaseTextEnvStepOutput, text: str
    ) -> None:
        """Record the reward of the last turn. Then end the rollout, or continue with the observations."""
        cfg, turn = self.generator_cfg, conversation.turns[-1]
        components = reward_components(output)
        turn.reward = weigh_components(_turn_reward(output, turn.end - turn.start), components, cfg.reward_weights)
        for name, value in components.items():
            rollout.reward_components[name] = rollout.reward_components.get(name, 0.0) + value
        action = output.get("postprocessed_action")
        if action is not None and action != text:
            if len(action) > self._max_chars:
                raise EnvError(
                    f"step() returned postprocessed_action with {len(action):,} characters; return at most "
                    f"{self._max_chars:,}"
                )
            conversation.replace_turn(action)
        if output["done"]:
            rollout.stop_reason = turn.stop_reason
            return
        if len(conversation.turns) >= cfg.max_turns:
            rollout.stop_reason = StopReason.MAX_TURNS
            return
        observations = output["observations"]
        history = (output.get("metadata") or {}).get("modified_chat_history")
        if cannot_fit([*(history or []), *observations], self._max_input_length):
            rollout.stop_reason = StopReason.LENGTH
            return
        observations = self._with_status(conversation, observations)
        if history is None:
            conversation.observe(observations)
        else:
            conversation.replace_history([*history, *observations])
        is_spent = cfg.max_response_length is not None and conversation.n_response_tokens >= cfg.max_response_length
        if is_spent or len(conversation.next_prompt()) > self._max_input_length:
            rollout.stop_reason = StopReason.LENGTH

    def _with_status(self, conversation: TokenConversation, observations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With `generator.inject_context_status`, append a line with the context and turns used so far."""
        if not self.generator_cfg.inject_context_status or not observations:
            return observations
        n_tokens, max_tokens = len(conversation.next_prompt()), self._max_input_length
        context = f"Context: {n_tokens}/{max_tokens} tokens ({round(100 * n_tokens / max_tokens)}%)"
        status = f"[{context}, Turn {len(conversation.turns)}/{self.generator_cfg.max_turns}]"
        last = observations[-1]
        content = last["content"]
        if isinstance(content, list):
            return [*observations[:-1], {**last, "content": [*content, {"type": "text", "text": status}]}]
        return [*observations[:-1], {**last, "content": f"{content}\n{status}"}]

    async def _finish(self, rollout: Rollout) -> None:
        """Free the engine's cache of the conversation, collect the environment's metrics, and close it."""
        await self.inference_engine_client.end_session(rollout.session_id)
        episode = rollout.episode
        if episode is None:
            return
        if rollout.is_over and rollout.error is None:  # a cancelled rollout may be in the middle of a call
            with _Boundary(ENVIRONMENT, rollout, "get_metrics", self._env_limit_s):
                rollout.env_metrics = validate_metrics(await episode.call("get_metrics"))
        try:
            with Wait(ENVIRONMENT, rollout, "close", self._env_limit_s):
                await episode.close()
        except Exception:  # the rollout keeps its result
            logger.warning("%s.close failed after rollout %s", rollout.env_class, rollout.request.id, exc_info=True)


def _turn_reward(output: BaseTextEnvStepOutput, n_tokens: int) -> Reward:
    """Return the reward of a turn, or a list with one reward per token."""
    reward: Any = output["reward"]
    if reward is None:
        raise UnknownReward("step() returned reward=None: the reward is unknown")
    if not isinstance(reward, list):
        return float(reward)
    if len(reward) != n_tokens:
        raise EnvError(f"step() returned {len(reward)} rewards for a turn of {n_tokens} tokens; return one for each")
    return [float(value) for value in reward]


class _Boundary(Wait):
    """A wait of a rollout, which becomes invalid if the code inside raises, unless the engine has too little memory."""

    __slots__ = ()

    def __exit__(  # type: ignore[override]
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> bool:
        try:
            super().__exit__(kind, error, traceback)
        except StalledError as stalled:
            error = stalled
        if not isinstance(error, Exception) or isinstance(error, OutOfMemoryError):
            return False
        rollout = self.who
        assert isinstance(rollout, Rollout)
        stop_reason = next(reason for kind, reason in STOP_REASONS if isinstance(error, kind))
        is_described = isinstance(error, EngineError | StalledError)
        message = str(error) if is_described else f"{rollout.env_class}.{self.detail} raised {describe_error(error)}"
        rollout.fail(stop_reason, message, error)
        return True
