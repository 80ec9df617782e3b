"""The runner of an agent: it plays trajectories of a task, for a trainer or on its own."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_agent.agents.base import BaseAgent
from skyrl_agent.chat import Chat, SamplingEngine
from skyrl_agent.config import AgentConfig
from skyrl_agent.dispatcher import create_dispatcher
from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.trajectory import AgentTrajectory, Instance
from skyrl_train.errors import DataError
from skyrl_train.generators.base import BatchMetadata, GeneratorInterface, RolloutRequest
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.env_pool import ThreadPool
from skyrl_train.generators.rollout import Rollout, play_until_valid
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import PromptRow, Trajectory, TrajectoryID

RATIOS = {
    "finish_tool_ratio": "FINISH_TOOL",
    "context_exceed_ratio": "CONTEXT_WINDOW_EXCEEDED",
    "iter_cap_ratio": "max_iterations_reached",
    "stuck_in_a_loop_ratio": "stuck_in_a_loop",
    "cmd_timeout_ratio": "cmd_timeout",
    "error_initialization": "error_initialization",
    "error_runtime": "error_runtime",
    "error_evaluation": "error_evaluation",
    "engine_error": "engine_error",
}
"""Metrics, and the stop reasons whose share they are."""


class AgentRunner(GeneratorInterface):
    """A generator whose rollouts are trajectories of an agent.

    A trajectory that fails is retried, and then invalid: no baseline, metric or loss reads its reward. Trajectories
    that end for one of `generator.masked_finish_reasons` have a loss mask of 0, and their rewards count in baselines.
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
        agent_cls.create_tools(cfg.tools)
        self.cfg = cfg
        self.agent_cls = agent_cls
        self.task = task
        self._engine = engine
        self._encoder = ChatEncoder(tokenizer, None, _template_kwargs(cfg, tokenizer))
        self._dispatchers = {
            phase: create_dispatcher(cfg.dispatcher, is_training=phase == "train") for phase in ("train", "eval")
        }
        n_agents = max(c.max_parallel_agents for c in (cfg.dispatcher, cfg.dispatcher.val_config) if c is not None)
        self._tool_threads = ThreadPool(n_agents, cfg.generator.tool_timeout, "tool")
        self._task_threads = ThreadPool(3 * n_agents, None, "task")  # a phase each
        self._n_drawn = 0  # instances of earlier calls of `run`

    async def run(self, input_batch: Any, val_mode: bool = False) -> dict[str, Any]:
        """Play `num_trajectories` of each row, and return SkyRL-Agent's parallel lists, see `to_agent_output`.

        Args:
            input_batch: a list of rows; SkyRL's `GeneratorInput`; or verl's `DataProto`.
            val_mode: take the number of trajectories and the sampling parameters of `val_config`.
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
        """Return one trajectory for each request, in order."""
        phase = metadata.training_phase
        played: dict[TrajectoryID, AgentTrajectory] = {}

        async def play(rollouts: Sequence[Rollout]) -> None:
            attempts = [self._new_trajectory(rollout, sampling) for rollout in rollouts]
            played.update((attempt.rollout.request.id, attempt) for attempt in attempts)
            await self._dispatchers[phase].run(attempts)

        trajectories = await play_until_valid(requests, metadata, play, n_retries=self.cfg.generator.n_retries)
        tool_calls = [played[request.id].tool_calls for request in requests]
        reported = agent_metrics(trajectories, tool_calls, self.cfg.generator.masked_finish_reasons)
        if not self.cfg.generator.profile_tools:
            reported = {name: value for name, value in reported.items() if not name.startswith("tool_")}
        self._reported = {**self._reported, phase: [*self._reported.get(phase, ()), reported]}
        return [self._mask(trajectory) for trajectory in trajectories]

    async def close(self) -> None:
        """End all threads."""
        await self._tool_threads.close()
        await self._task_threads.close()

    def _new_trajectory(self, rollout: Rollout, sampling: SamplingParams) -> AgentTrajectory:
        settings, row = self.cfg.generator, rollout.request.row
        chat = Chat(
            *(rollout, self._engine, self._encoder, sampling),
            max_response_length=settings.max_response_length,
            renders_history=not settings.qwen3_acc_thinking,
            removes_thoughts=settings.remove_think_tokens,
            logs_turns=settings.debug_log,
        )
        instance = Instance.from_row({**row.env_extras, "prompt": row.prompt}, row.uid, self.cfg)
        return AgentTrajectory(
            *(rollout, instance, self.cfg, self.agent_cls, self.task, chat, self._task_threads, self._tool_threads)
        )

    def _mask(self, trajectory: Trajectory) -> Trajectory:
        if not trajectory.is_valid or trajectory.stop_reason not in self.cfg.generator.masked_finish_reasons:
            return trajectory
        segments = (replace(s, loss_mask=[0] * len(s.loss_mask)) for s in trajectory.segments)
        return replace(trajectory, segments=tuple(segments))


def _template_kwargs(cfg: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the variables of the chat template: `enable_thinking`, for templates that read it."""
    reads_thinking = "enable_thinking" in str(tokenizer.chat_template or "")
    return {"enable_thinking": cfg.generator.qwen3_enable_thinking} if reads_thinking else {}


def to_rows(input_batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch, a column each key.

    Raises:
        DataError: it is none of the types that `AgentRunner.run` accepts.
    """
    if isinstance(columns := getattr(input_batch, "non_tensor_batch", None), Mapping):  # verl's DataProto
        names = [("prompt" if name == "raw_prompt" else name) for name in columns]
        return [dict(zip(names, map(_as_plain, values), strict=True)) for values in zip(*columns.values(), strict=True)]
    if isinstance(input_batch, Mapping) and "prompts" in input_batch:
        extras = input_batch.get("env_extras") or [{} for _ in input_batch["prompts"]]
        return [{**row, "prompt": prompt} for prompt, row in zip(input_batch["prompts"], extras, strict=True)]
    if isinstance(input_batch, Sequence) and all(isinstance(row, Mapping) for row in input_batch):
        return [dict(row) for row in input_batch]
    raise DataError(
        f"the input batch is a {type(input_batch).__name__}; pass a list of rows, a GeneratorInput or a DataProto"
    )


def _as_plain(value: Any) -> Any:
    """Return numpy's arrays and numbers as lists and Python's numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def to_agent_output(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, Any]:
    """Convert trajectories to SkyRL-Agent's parallel lists, with one entry for each row of training data.

    `rewards` repeats the reward of a trajectory for each of its rows. `traj_rewards`, `episode_nums` (the number of
    rows) and `traj_idx` (of the instance) have one entry for each trajectory; `is_last_episode` marks the last row of
    each. An invalid trajectory has the reward None.
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


def agent_metrics(
    trajectories: Sequence[Trajectory], tool_calls: Sequence[Mapping[str, int]], masked: Sequence[str]
) -> dict[str, float]:
    """Return the metrics of a batch of trajectories. `tool_calls` has the number of calls of each tool."""
    if not trajectories:
        return {}
    valid = [t for t in trajectories if t.is_valid]
    groups: dict[int, list[float]] = {}
    for t in valid:
        groups.setdefault(t.id.draw, []).append(t.total_reward)
    reasons = Counter(t.stop_reason for t in trajectories)
    n_masked = [t for t in valid if t.stop_reason in masked]
    totals = [sum(calls.values()) for calls in tool_calls]
    names = sorted({name for calls in tool_calls for name in calls})
    return {
        "avg_turn_assistant": statistics.fmean(len(t.turns) for t in trajectories),
        "num_all_resolved": float(sum(min(rewards) > 0 for rewards in groups.values())),
        "num_none_resolved": float(sum(max(rewards) <= 0 for rewards in groups.values())),
        **{name: reasons[reason] / len(trajectories) for name, reason in RATIOS.items()},
        "num_mask_out": float(len(n_masked)),
        "num_mask_non_zero_reward": float(sum(t.total_reward != 0 for t in n_masked)),
        **({"raw_reward": statistics.fmean(t.total_reward for t in valid)} if valid else {}),
        "tool_calls_total": float(sum(totals)),
        "tool_calls_per_traj_mean": statistics.fmean(totals),
        "tool_calls_per_traj_min": float(min(totals)),
        "tool_calls_per_traj_max": float(max(totals)),
        **{f"tool_name/{name}": float(sum(calls.get(name, 0) for calls in tool_calls)) for name in names},
    }
