"""Task files: the YAML that describes an agent, its task, its tools and how it is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from annotated_types import Ge, Gt
from pydantic import AliasChoices, Field, ValidationError, model_validator

from skyrl_train.compat.skyrl.sampling_params import to_sampling
from skyrl_train.config.base import Count, Section
from skyrl_train.config.problems import config_error
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.base import SamplingParams

S = TypeVar("S", bound=Section)

MASKED_FINISH_REASONS = ("CONTEXT_WINDOW_EXCEEDED", "max_iterations_reached", "stuck_in_a_loop", "cmd_timeout")
"""Finish reasons whose trajectories are not trained on by default."""


class DataKeys(Section):
    """Columns of a dataset row, as dotted paths such as `extra_info.instance`."""

    instance_key: str | None = None
    """The instance that the task receives. Defaults to all columns of the row."""

    instance_id_key: str | None = None
    """Column with the instance's name for messages. Defaults to the row number."""

    data_source_key: str | None = "data_source"
    """The row's dataset, which selects the grader. Rows without this column belong to the source "default"."""


class AgentBackendConfig(Section):
    """Connection to an engine that skyrl-train does not start."""

    model_name: str | None = None
    """The model's name on the server of `infer_backend: openai_server`."""

    api_url: str | None = None
    """Address of the server's API, e.g. http://localhost:8000/v1."""

    model_max_len: Count
    """Maximum number of tokens of prompt and response together."""


class ValidationSampling(Section):
    """Sampling for evaluations."""

    num_trajectories: Count = 1
    """Trajectories per instance."""

    sampling_params: dict[str, Any] = Field(default={})
    """Sampling parameters that differ from training."""


class AgentGeneration(Section):
    """Sampling of trajectories."""

    infer_backend: Literal["skyrl-train", "verl", "tinker", "openai_server"] = "skyrl-train"
    """The kind of engine that `AutoAgentRunner.from_task` gets."""

    backend_config: AgentBackendConfig | None = None
    """The engine for all backends except skyrl-train."""

    num_trajectories: Count = 8
    """Trajectories per instance. They are compared with each other."""

    max_iterations: Count = 20
    """Maximum number of turns of the agent."""

    max_response_length: Count = Field(
        default=8192, validation_alias=AliasChoices("max_response_length", "max_prompt_length")
    )
    """Maximum number of tokens after the first prompt of each history. SkyRL-Agent calls it `max_prompt_length`."""

    sampling_params: dict[str, Any] = Field(default={})
    """Sampling parameters with vLLM's names: temperature, top_p, top_k, max_tokens (per turn), stop, …"""

    val_config: ValidationSampling = ValidationSampling()
    """Sampling for evaluations."""

    remove_think_tokens: bool = False
    """Remove the thoughts of a turn from the history that later turns read."""

    qwen3_enable_thinking: bool = True
    """Pass `enable_thinking` to the chat template."""

    qwen3_acc_thinking: bool = True
    """Keep the thoughts of earlier turns in the history. If false, the chat template renders it anew for each turn."""

    vision_is_active: Literal[False] = False
    """Images. Not supported."""

    enable_turn_reminder: bool = False
    """Tell the agent after each turn how many remain."""

    early_step_threshold: Annotated[int, Ge(0)] = 0
    """Number of turns before which the reminder asks the agent not to finish. 0 means none."""

    profile_tools: bool = True
    """Report the number of calls per tool as `rollout_metrics/tool_name/*`."""

    debug_log: bool = False
    """Log each turn."""

    max_repeats: Annotated[int, Ge(0)] | None = None
    """End a trajectory with `stuck_in_a_loop` after this many equal calls with equal results in a row. 0 means no
    limit. Defaults to the agent's limit: 4 for `CodeActAgent`, none for `ReActAgent`. Raise it for agents that poll."""

    tool_timeout: Annotated[float, Gt(0)] = 600.0
    """Seconds after which a tool call is abandoned and ends its trajectory with `cmd_timeout`."""

    task_timeout: Annotated[float, Gt(0)] = 3600.0
    """Seconds after which a method of the task is abandoned, so its trajectory is invalid."""

    trajectory_timeout: Annotated[float, Gt(0)] = 14_400.0
    """Maximum seconds that an agent may run, including waits for the engine. After that, the trajectory is invalid."""

    n_retries: Annotated[int, Ge(0)] = 1
    """Number of retries of a failed trajectory."""

    masked_finish_reasons: tuple[str, ...] = MASKED_FINISH_REASONS
    """Trajectories that end for these reasons are not trained on. Their rewards count in the group's baseline."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        backend = self.backend_config
        if self.infer_backend == "skyrl-train" and backend is not None:
            raise ValueError("infer_backend=skyrl-train takes no backend_config; remove it")
        if self.infer_backend != "skyrl-train" and backend is None:
            raise ValueError(f"infer_backend={self.infer_backend} needs backend_config.model_max_len, such as 32768")
        is_server = self.infer_backend == "openai_server"
        for name in ("model_name", "api_url"):
            if backend is not None and (getattr(backend, name) is not None) != is_server:
                fix = f"needs backend_config.{name}" if is_server else f"takes no backend_config.{name}; remove it"
                raise ValueError(f"infer_backend={self.infer_backend} {fix}")
        if self.max_repeats == 1:
            raise ValueError("max_repeats=1 would end each trajectory with its first call; set 2 or more, or 0")
        for params in (self.sampling_params, self.val_config.sampling_params):
            to_sampling({"max_tokens": 1, **params}, None)
        return self

    def sampling(self, *, is_training: bool) -> SamplingParams:
        """Return the sampling parameters for training or evaluation."""
        params = {"max_tokens": self.max_response_length, **self.sampling_params}
        return to_sampling(params if is_training else {**params, **self.val_config.sampling_params}, None)


class DispatcherLimits(Section):
    """Limits of parallel work."""

    max_parallel_agents: Count = 16
    """Maximum number of trajectories that generate concurrently."""

    max_eval_parallel_agents: Count | None = None
    """Maximum number of trajectories that are evaluated concurrently. Defaults to `max_parallel_agents`."""


class DispatcherConfig(DispatcherLimits):
    """Parallelism of trajectories."""

    type: Literal["async_pipeline", "async_batch", "async_fix_pool"] = "async_pipeline"
    """async_pipeline: separate limits per phase, so that new runtimes start and finished ones are evaluated while other
    trajectories generate. async_batch: one limit for whole trajectories. async_fix_pool: each trajectory borrows one of
    `envs`."""

    scheduler: Literal["naive"] = "naive"
    """Trajectories start in the order of their instances."""

    envs: tuple[str, ...] = ()
    """Environments for `async_fix_pool`, e.g. addresses. `BaseTask.initialize_runtime` gets one of them as `env`."""

    val_config: DispatcherLimits | None = None
    """Limits for evaluations. Defaults to the same limits."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "async_fix_pool" and not self.envs:
            raise ValueError("type=async_fix_pool needs dispatcher.envs; list at least one")
        if self.type != "async_fix_pool" and self.envs:
            raise ValueError(f"type={self.type} takes no dispatcher.envs; remove them, or set type=async_fix_pool")
        return self


class AgentConfig(Section):
    """Settings in a task file."""

    agent_cls: str = "skyrl_agent.agents.react.ReActAgent"
    """The agent, as a dotted path."""

    task: str
    """The task, as a dotted path to a subclass of `BaseTask`."""

    tools: tuple[str | dict[str, Any], ...] | dict[str, bool] = ()
    """Names of registered tools, dotted paths to tools, or either with settings: {name: …, **settings}. For an agent
    with a shell, a section of switches such as enable_bash_tool."""

    data: DataKeys = DataKeys()
    """Columns of dataset rows."""

    generator: AgentGeneration = AgentGeneration()
    """Sampling of trajectories."""

    dispatcher: DispatcherConfig = DispatcherConfig()
    """Parallelism of trajectories."""

    @classmethod
    def load(cls, path: str | Path) -> AgentConfig:
        """Read a task file.

        Raises:
            FileNotFoundError: the file does not exist.
            ConfigError: the file is invalid. The error lists every problem.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no task file {str(path)!r}")
        return load_section(cls, Path(path))


def read_settings(path: Path) -> Mapping[str, Any]:
    """Read the mapping in a YAML file. Raises ConfigError if there is none."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path} must be a mapping, with keys such as agent_cls, task, tools, generator or harness")
    return settings


def load_section(cls: type[S], path: Path) -> S:
    """Read a section from a YAML file. Raise a ConfigError that lists every problem."""
    try:
        return cls.model_validate(_lists_as_tuples(read_settings(path)))
    except ValidationError as error:
        raise config_error(
            ": ".join(
                filter(None, (str(path), ".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")))
            )
            + (f"; got {item['input']!r}" if item["type"] not in ("missing", "value_error") else "")
            for item in error.errors()
        ) from error


def _lists_as_tuples(value: Any) -> Any:
    """Return nested settings with lists as tuples, since a frozen section cannot hold lists."""
    if isinstance(value, Mapping):
        return {key: _lists_as_tuples(inner) for key, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value
