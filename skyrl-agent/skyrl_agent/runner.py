"""The runner of an agent: plays trajectories of a task, for a trainer or standalone."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_agent.agents.base import BaseAgent
from skyrl_agent.chat import Chat, SamplingEngine
from skyrl_agent.config import AgentConfig
from skyrl_agent.dispatcher import create_dispatchers
from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.tools.base import close_tools
from skyrl_agent.trajectory import AgentTrajectory
from skyrl_gym.runtime.env_pool import ThreadPool
from skyrl_gym.runtime.text import describe_error
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.generators.base import BatchMetadata, RolloutGenerator, RolloutRequest
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.rewards import RewardFunctions
from skyrl_train.generators.rollout import Rollout, play_until_valid
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import PromptRow, Trajectory, TrajectoryID
from skyrl_train.types.tokens import Phase

RATIOS = {
    "finish_tool_ratio": "FINISH_TOOL",
    "context_exceed_ratio": "CONTEXT_WINDOW_EXCEEDED",
    "iter_cap_ratio": "max_iterations_reached",
    "stuck_in_a_loop_ratio": "stuck_in_a_loop",
    "cmd_timeout_ratio": "cmd_timeout",
    "error_initialization": "error_initialization",
    "error_runtime": "error_runtime",
    "error_evaluation": "error_evaluation",
    "trajectory_timeout": "trajectory_timeout",
    "engine_error": "engine_error",
}
"""Stop reasons whose shares are metrics, by metric name."""


class AgentRunner(RolloutGenerator):
    """A generator whose rollouts are trajectories of an agent.

    A failed trajectory is retried. If it fails again, it is invalid: no baseline, metric or loss reads its reward.
    Trajectories that end for one of `generator.masked_finish_reasons` have a loss mask of 0, but their rewards still
    count in baselines.
    """

    def __init__(
        self,
        cfg: AgentConfig,
        engine: SamplingEngine,
        tokenizer: PreTrainedTokenizerBase,
        agent_cls: type[BaseAgent],
        task: type[BaseTask],
    ) -> None:
        """Create the runner.

        Raises:
            ConfigError: a tool does not exist, or the chat template cannot join turns.
        """
        tools = agent_cls.create_tools(cfg.tools)  # reports mistakes before the first trajectory
        close_tools(tools.values())
        self.cfg = cfg
        self.agent_cls = agent_cls
        self.task = task
        self.rewards: RewardFunctions | None = None
        reads_thinking = "enable_thinking" in str(tokenizer.chat_template or "")
        template_kwargs = {"enable_thinking": cfg.generator.qwen3_enable_thinking} if reads_thinking else {}
        self.encoder = ChatEncoder(tokenizer, None, template_kwargs)
        if tools:
            try:
                self.encoder.prompt_ids([{"role": "system", "content": "?"}, {"role": "user", "content": "?"}])
            except DataError as error:
                reason = describe_error(error.__cause__ or error)
                raise ConfigError(
                    f"the chat template rejects the system message that describes the tools: {reason}; use a tokenizer "
                    "whose template has system messages"
                ) from error
        self._engine = engine
        self._workers: _Workers | None = None
        self._n_drawn = 0  # rows of earlier `run` calls
        self._played: dict[Phase, list[_Played]] = {"train": [], "eval": []}  # since the last `take_metrics`

    async def run(self, input_batch: Any, val_mode: bool = False) -> dict[str, Any]:
        """Play `num_trajectories` trajectories per row. Return the lists of `to_agent_output` and `rollout_metrics`.

        Args:
            input_batch: a list of rows, SkyRL's `GeneratorInput`, or verl's `DataProto`.
            val_mode: use `val_config`'s number of trajectories and sampling parameters.
        """
        settings, is_training = self.cfg.generator, not val_mode
        n_samples = settings.num_trajectories if is_training else settings.val_config.num_trajectories
        rows = to_rows(input_batch)
        requests = [
            RolloutRequest(
                TrajectoryID(str(i), sample, self._n_drawn + i, "train" if is_training else "eval"),
                PromptRow(str(i), row.get("prompt") or [], None, {k: v for k, v in row.items() if k != "prompt"}),
            )
            for i, row in enumerate(rows)
            for sample in range(n_samples)
        ]
        self._n_drawn += len(rows)
        metadata = BatchMetadata(0, requests[0].id.phase if requests else "train")
        trajectories = await self.rollout(requests, settings.sampling(is_training=is_training), metadata)
        return {
            **to_agent_output(trajectories, n_samples),
            "rollout_metrics": self.take_metrics(metadata.training_phase),
        }

    async def rollout(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        """Return one trajectory per request, in order."""
        phase = metadata.training_phase
        played: dict[TrajectoryID, AgentTrajectory] = {}

        async def play(rollouts: Sequence[Rollout]) -> None:
            attempts = [self._new_trajectory(rollout, sampling, workers) for rollout in rollouts]
            played.update((attempt.rollout.request.id, attempt) for attempt in attempts)
            await workers.dispatchers[phase].run(attempts)

        workers = await self._get_workers()
        trajectories = await play_until_valid(requests, metadata, play, n_retries=self.cfg.generator.n_retries)
        if self.rewards is not None:
            trajectories = await self.rewards.add_to(trajectories)
        self._played[phase] += [_Played.of(t, played[t.id].tool_calls) for t in trajectories]
        return [self._mask(trajectory) for trajectory in trajectories]

    def take_metrics(self, phase: Phase = "train") -> dict[str, float]:
        """Return the metrics of a phase's trajectories since the last call."""
        played, self._played[phase] = self._played[phase], []
        settings = self.cfg.generator
        metrics = agent_metrics(played, settings.masked_finish_reasons)
        if not settings.profile_tools:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("tool_")}
        return metrics

    async def close(self) -> None:
        """End all threads."""
        if self._workers is not None:
            await self._workers.close()
            self._workers = None

    async def _get_workers(self) -> _Workers:
        """Return the running event loop's dispatchers and threads. Replace them if their event loop has ended."""
        loop = asyncio.get_running_loop()
        workers = self._workers
        if workers is not None and workers.loop is loop:
            return workers
        self._workers = new = _Workers(self.cfg, loop)
        if workers is not None:
            await workers.close()
        return new

    def _new_trajectory(self, rollout: Rollout, sampling: SamplingParams, workers: _Workers) -> AgentTrajectory:
        settings = self.cfg.generator
        chat = Chat(
            *(rollout, self._engine, self.encoder, sampling),
            max_response_length=settings.max_response_length,
            renders_history=not settings.qwen3_acc_thinking,
            removes_thoughts=settings.remove_think_tokens,
            logs_turns=settings.debug_log,
        )
        threads = workers.task_threads, workers.tool_threads
        return AgentTrajectory(rollout, self.cfg, self.agent_cls, self.task, chat, *threads)

    def _mask(self, trajectory: Trajectory) -> Trajectory:
        if not trajectory.is_valid or trajectory.stop_reason not in self.cfg.generator.masked_finish_reasons:
            return trajectory
        segments = (replace(s, loss_mask=[0] * len(s.loss_mask)) for s in trajectory.segments)
        return replace(trajectory, segments=tuple(segments))


class _Workers:
    """The dispatchers and threads of an event loop."""

    def __init__(self, cfg: AgentConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.dispatchers = create_dispatchers(cfg.dispatcher)
        limits = [one for one in (cfg.dispatcher, cfg.dispatcher.val_config) if one is not None]
        n_agents = sum(one.max_parallel_agents for one in limits)
        n_evaluations = sum(one.max_eval_parallel_agents or one.max_parallel_agents for one in limits)
        settings = cfg.generator
        self.tool_threads = ThreadPool(n_agents, settings.tool_timeout, "tool")
        self.task_threads = ThreadPool(2 * n_agents + n_evaluations, settings.task_timeout, "task")

    async def close(self) -> None:
        await self.tool_threads.close()
        await self.task_threads.close()


@dataclass(frozen=True, slots=True)
class _Played:
    """The facts about a trajectory that `agent_metrics` needs."""

    group: int
    stop_reason: str
    reward: float | None  # None: invalid
    n_turns: int
    tool_calls: Mapping[str, int]

    @classmethod
    def of(cls, trajectory: Trajectory, tool_calls: Mapping[str, int]) -> _Played:
        reward = trajectory.total_reward if trajectory.is_valid else None
        return cls(trajectory.id.draw, trajectory.stop_reason, reward, len(trajectory.turns), tool_calls)


def to_rows(input_batch: Any) -> list[dict[str, Any]]:
    """Convert a batch to rows: dicts of column values.

    Raises:
        DataError: the batch has an unsupported type.
    """
    if isinstance(columns := getattr(input_batch, "non_tensor_batch", None), Mapping):  # verl's DataProto
        values = zip(*columns.values(), strict=True)
        rows: list[Any] = [dict(zip(columns, row, strict=True)) for row in values]
    elif isinstance(input_batch, Mapping) and "prompts" in input_batch:
        extras = input_batch.get("env_extras") or [{} for _ in input_batch["prompts"]]
        rows = [{**row, "prompt": prompt} for prompt, row in zip(input_batch["prompts"], extras, strict=True)]
    elif isinstance(input_batch, Sequence) and all(isinstance(row, Mapping) for row in input_batch):
        rows = list(input_batch)
    else:
        raise DataError(
            f"the input batch is of the type {type(input_batch).__name__}; pass a list of rows, a GeneratorInput or a "
            "DataProto"
        )
    return [
        {("prompt" if key == "raw_prompt" else key): _as_plain(value) for key, value in row.items()} for row in rows
    ]


def _as_plain(value: Any) -> Any:
    """Convert numpy arrays and numbers to lists and Python numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _as_plain(inner) for key, inner in value.items()}
    return [_as_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def to_agent_output(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, Any]:
    """Convert trajectories to SkyRL-Agent's parallel lists, with one entry per row of training data.

    `rewards` repeats a trajectory's reward for each of its rows. `traj_rewards`, `episode_nums` (the number of rows)
    and `traj_idx` (the index of the instance) have one entry per trajectory. `is_last_episode` marks each trajectory's
    last row. Invalid trajectories have the reward None.
    """
    rows = [(t, segment) for t in trajectories for segment in t.segments]
    rewards = [t.total_reward if t.is_valid else None for t in trajectories]
    logprobs = [segment.logprobs for _, segment in rows]
    return {
        "prompt_token_ids": [segment.prompt_ids for _, segment in rows],
        "response_ids": [segment.response_ids for _, segment in rows],
        "rewards": [reward for t, reward in zip(trajectories, rewards, strict=True) for _ in t.segments],
        "traj_rewards": rewards,
        "loss_masks": [segment.loss_mask for _, segment in rows],
        "episode_nums": [len(t.segments) for t in trajectories],
        "is_last_episode": [segment is t.segments[-1] for t, segment in rows],
        "traj_idx": [i // max(n_samples, 1) for i in range(len(trajectories))],
        "stop_reasons": [t.stop_reason for t, _ in rows],
        "rollout_logprobs": None if None in logprobs else logprobs,
    }


def agent_metrics(played: Sequence[_Played], masked_reasons: Sequence[str]) -> dict[str, float]:
    """Compute metrics over trajectories."""
    if not played:
        return {}
    groups: dict[int, list[float]] = {}
    for one in played:
        if one.reward is not None:
            groups.setdefault(one.group, []).append(one.reward)
    rewards = [reward for group in groups.values() for reward in group]
    masked = [one.reward for one in played if one.reward is not None and one.stop_reason in masked_reasons]
    reasons = Counter(one.stop_reason for one in played)
    n_calls = [sum(one.tool_calls.values()) for one in played]
    by_tool: Counter[str] = Counter()
    for one in played:
        by_tool.update(one.tool_calls)
    return {
        "avg_turn_assistant": statistics.fmean(one.n_turns for one in played),
        "num_all_resolved": float(sum(min(group) > 0 for group in groups.values())),
        "num_none_resolved": float(sum(max(group) <= 0 for group in groups.values())),
        **{name: reasons[reason] / len(played) for name, reason in RATIOS.items()},
        "num_mask_out": float(len(masked)),
        "num_mask_non_zero_reward": float(sum(reward != 0 for reward in masked)),
        **({"raw_reward": statistics.fmean(rewards)} if rewards else {}),
        "tool_calls_total": float(sum(n_calls)),
        "tool_calls_per_traj_mean": statistics.fmean(n_calls),
        "tool_calls_per_traj_min": float(min(n_calls)),
        "tool_calls_per_traj_max": float(max(n_calls)),
        **{f"tool_name/{name}": float(n) for name, n in sorted(by_tool.items())},
    }
