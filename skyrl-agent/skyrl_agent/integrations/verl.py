"""Agents in verl: an agent loop that verl's trainer runs once per sample.

    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.multi_turn.enable=true
    actor_rollout_ref.rollout.agent.default_agent_loop=skyrl_agent
    actor_rollout_ref.rollout.agent.agent_loop_config_path=agent.yaml

with this agent.yaml:

    - name: skyrl_agent
      _target_: skyrl_agent.integrations.verl.SkyRLAgentLoop
      task_yaml: task.yaml

verl's `data.max_response_length` must be at least the task file's token budget.
"""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from skyrl_agent.auto import AutoAgentRunner
from skyrl_agent.config import AgentConfig
from skyrl_agent.runner import AgentRunner, to_rows
from skyrl_train.compat.skyrl.sampling_params import to_sampling, to_sampling_params
from skyrl_train.errors import ConfigError, EnvError
from skyrl_train.generators.base import BatchMetadata, RolloutRequest
from skyrl_train.types import PromptRow, TrajectoryID

_runners: dict[tuple[str, int], tuple[Any, AgentRunner]] = {}
"""The server manager and runner per (task file, ID of the server manager). verl creates a loop for each sample, but a
task file's limits hold for all of them."""


@register("skyrl_agent")
class SkyRLAgentLoop(AgentLoopBase):
    """An agent loop that plays one trajectory of a task file for each of verl's samples.

    The task computes the reward, so verl's reward functions are not called. Invalid trajectories, and trajectories that
    end for a masked reason, have a response mask of 0. verl cannot represent a trajectory whose history was rewritten.
    """

    def __init__(self, *args: Any, task_yaml: str, **kwargs: Any) -> None:
        """Find or create the task file's runner. Its `infer_backend` must be verl."""
        super().__init__(*args, **kwargs)
        key = task_yaml, id(self.server_manager)
        if key not in _runners:
            cfg = AgentConfig.load(task_yaml)
            if cfg.generator.infer_backend != "verl":
                raise ConfigError(f"{task_yaml}: generator.infer_backend={cfg.generator.infer_backend} must be verl")
            runner = AutoAgentRunner.from_task(cfg, self.server_manager, self.tokenizer)
            _runners[key] = self.server_manager, runner
        self._runner = _runners[key][1]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Return the trajectory of one sample. `kwargs` are the columns of its row. verl's sampling parameters override
        the task file's.
        """
        (row,) = to_rows([kwargs])
        ours = to_sampling_params(self._runner.cfg.generator.sampling(is_training=True))
        sampling = to_sampling({**ours, **sampling_params, "logprobs": 0}, None)
        name = str(row.get("index", "0"))
        request = RolloutRequest(
            TrajectoryID(name, 0, draw=uuid4().int & (2**31 - 1)),
            PromptRow(name, list(row["prompt"]), None, {key: value for key, value in row.items() if key != "prompt"}),
        )
        (trajectory,) = await self._runner.rollout([request], sampling, BatchMetadata(0, "train"))
        self._runner.take_metrics()
        if len(trajectory.segments) > 1:
            raise EnvError(
                f"the agent rewrote its history, and verl takes one row of tokens for each sample; train "
                f"{self._runner.agent_cls.__name__} with skyrl-train or Tinker"
            )
        (segment,) = trajectory.segments
        eos = self.tokenizer.eos_token_id
        is_empty = not segment.loss_mask  # an invalid trajectory without a turn
        mask = segment.loss_mask if trajectory.is_valid else [0] * len(segment.loss_mask)
        return AgentLoopOutput(
            prompt_ids=segment.prompt_ids or [eos],
            response_ids=[eos] if is_empty else segment.response_ids,
            response_mask=[0] if is_empty else mask,
            response_logprobs=None if is_empty else segment.logprobs,
            reward_score=trajectory.total_reward if trajectory.is_valid else 0.0,
            num_turns=2 * len(trajectory.turns),
            metrics=AgentLoopMetrics(
                generate_sequences=trajectory.timing.get("generate", 0.0), tool_calls=trajectory.timing.get("env", 0.0)
            ),
            extra_fields={"stop_reason": trajectory.stop_reason},
        )
