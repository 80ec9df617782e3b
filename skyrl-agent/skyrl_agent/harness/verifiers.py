"""Verifiers environments with their own programs, runtimes and rewards: `skyrl-agent train verifiers`.

Verifiers runs everything. Only the model is ours: each episode gets a client that sends the trained agent's requests
to the session of its rollout. Other agents without a client of their own use the same model, and are not recorded.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
from pydantic import ValidationError

from skyrl_agent.agent_generator import AgentResult, NoReward
from skyrl_agent.harness.agent import TaskAgent
from skyrl_agent.harness.config import HarnessConfig
from skyrl_gym.adapters.background_loop import BackgroundLoop
from skyrl_gym.adapters.verifiers.env import VerifiersSettings, resolve_row
from skyrl_gym.adapters.verifiers.package import load_package
from skyrl_gym.adapters.verifiers.turn import VerifiersError
from skyrl_gym.error import InvalidSettings
from skyrl_gym.optional import require
from skyrl_train.errors import DataError
from skyrl_train.types import PromptRow, StopReason

require("verifiers", "verifiers", "environments of verifiers")

import verifiers.v1 as vf  # noqa: E402
from verifiers.v1.clients.eval import EvalClient  # noqa: E402
from verifiers.v1.configs.agent import agent_config_fields  # noqa: E402
from verifiers.v1.interception.server import InterceptionServer, InterceptionServerConfig  # noqa: E402

from skyrl_gym.adapters.verifiers.v1 import Tasks, read_result  # noqa: E402

SECTION = "environment.skyrl_gym.verifiers"
UNTRAINED_CLIENT = vf.EvalClientConfig(base_url="http://policy.invalid", api_key_var="NO_API_KEY")
"""The client of agents that use the model and are not trained. It is replaced by a `PolicyClient`."""

FAILURES = {"HarnessError": "agent_exit", "SandboxError": "workspace_error"}
"""Stop reasons by the name of verifiers' error. All others are `agent_error`."""


class VerifiersAgent(TaskAgent):
    """An agent for `AgentGenerator`: each call plays an episode and gives the reward of the trained agent."""

    def __init__(self, cfg: HarnessConfig, settings: Mapping[str, Any] | None) -> None:
        """Prepare an event loop. `settings` is the configuration's section for verifiers, which overrides the rows."""
        self.cfg = cfg
        self._settings = settings
        self._environments: dict[str, _Environment] = {}
        self._loop = BackgroundLoop("verifiers")

    def check_row(self, row: PromptRow) -> None:
        """Load the row's environment and task. Raise DataError if they cannot be trained."""
        self._find(row)

    async def __call__(
        self, *, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str
    ) -> AgentResult:
        """Play the task of a row. Raise NoReward if the episode fails or is not scored."""
        environment, task = self._find(row)
        return await asyncio.wrap_future(self._loop.submit(environment.play(task, base_url, model)))

    async def close(self) -> None:
        """Close the environments and end the event loop."""
        for environment in self._environments.values():
            await asyncio.wrap_future(self._loop.submit(environment.close()))
        self._environments.clear()
        await asyncio.to_thread(self._loop.close)

    def _find(self, row: PromptRow) -> tuple[_Environment, vf.Task]:
        try:
            settings, row_input = resolve_row(self._settings, row.env_extras)
            key = json.dumps([settings.id, settings.args, settings.env, settings.trained], sort_keys=True, default=repr)
            if key not in self._environments:
                tasks = load_package(settings.id, settings.args, settings.env, is_chat=False)
                if not isinstance(tasks, Tasks):
                    raise DataError(f"{settings.id} is of verifiers' first generation, which has no programs")
                self._environments[key] = _Environment(tasks, settings, self.cfg)
            environment = self._environments[key]
            return environment, environment.tasks.task(row_input)
        except (ImportError, ValueError, ValidationError, InvalidSettings) as error:
            raise DataError(str(error)) from error


class _Environment:
    """An environment and its shared tool servers, from the first episode to `close`."""

    def __init__(self, tasks: Tasks, settings: VerifiersSettings, cfg: HarnessConfig) -> None:
        self.tasks, self._name = tasks, tasks.config.env_id
        self._role = _find_role(tasks.config, settings.trained)
        self._env: vf.Env[Any] = vf.load_environment(_with_policy(tasks, self._role, cfg))
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._http: httpx.AsyncClient | None = None

    async def play(self, task: vf.Task, base_url: str, model: str) -> AgentResult:
        """Play an episode whose trained agent uses the session at `base_url`. Raise NoReward if it fails."""
        await self._open()
        interception = self._env._interception
        assert isinstance(interception, InterceptionServer)
        assert self._http is not None
        config = vf.EvalClientConfig(base_url=base_url, api_key_var=UNTRAINED_CLIENT.api_key_var)
        # The server finds clients by this key. It would keep a client of its own until it closes.
        key = config.model_dump_json()
        interception.clients[key] = PolicyClient(base_url, self._http)
        unrecorded_url = re.sub(r"/session/[^/]+", "", base_url)
        interception.clients[UNTRAINED_CLIENT.model_dump_json()] = PolicyClient(unrecorded_url, self._http)
        try:
            episode = await self._env.run_episode(task, vf.ModelContext(model, config))
        finally:
            del interception.clients[key]
        return self._read(episode)

    async def close(self) -> None:
        """Stop the servers."""
        await self._stack.aclose()

    async def _open(self) -> None:
        async with self._opening:
            if self._http is None:
                await self._stack.enter_async_context(self._env.serving())
                self._http = await self._stack.enter_async_context(httpx.AsyncClient(timeout=None))

    def _read(self, episode: vf.Episode) -> AgentResult:
        """Return the reward of the trained agent. Raises NoReward."""
        traces = [trace for trace in episode.traces if trace.agent.name == self._role]
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
            message = errors[-1].message if errors else "it did not end in time"
            raise NoReward(StopReason.AGENT_TIMEOUT, f"{self._name}: {message}")
        if not episode.ok:
            error = errors[-1] if errors else None
            reason = FAILURES.get(error.type if error else "", StopReason.AGENT_ERROR)
            raise NoReward(reason, f"{self._name}: {f'{error.type}: {error.message}' if error else 'not completed'}")
        if len(traces) != 1:
            raise NoReward(
                StopReason.AGENT_ERROR,
                f"{self._name} ran {self._role} {len(traces)} times; the trained agent must run once in an episode",
            )
        try:
            result = read_result(traces[0], self._name)
        except VerifiersError as error:
            raise NoReward(StopReason.REWARD_UNKNOWN, str(error)) from error
        return AgentResult(result.reward, result.components, {**result.metrics, "agents": len(episode.traces)})


class PolicyClient(EvalClient):
    """A verifiers client of our endpoint. It shares its connections with other sessions."""

    def __init__(self, base_url: str, http: httpx.AsyncClient) -> None:
        self.base_url, self.api_key, self.client = base_url, "unused", http
        self.headers: dict[str, str] = {}

    async def close(self) -> None:
        """Do nothing: the connections belong to the environment."""


def _find_role(config: vf.EnvConfig, trained: str) -> str:
    """Return the name of the trained agent. Raises ValueError."""
    roles = agent_config_fields(config)
    if not trained and len(roles) == 1:
        return next(iter(roles))
    if trained not in roles:
        raise ValueError(
            f"{SECTION}.trained={trained or '<unset>'}: {config.env_id} has the agents {', '.join(roles)}; set it to "
            "one of them"
        )
    return trained


def _with_policy(tasks: Tasks, role: str, cfg: HarnessConfig) -> vf.EnvConfig:
    """Return the environment's configuration with the policy as model.

    Raises:
        ValueError: a setting cannot be honoured.
    """
    config = tasks.config
    if config.retries != vf.RetryConfig():
        raise ValueError(f"{SECTION}.env.retries: set generator.n_rollout_retries instead")
    changes: dict[str, Any] = {}
    if not isinstance(config.interception, InterceptionServerConfig):
        if "interception" in config.model_fields_set:
            raise ValueError(f"{SECTION}.env.interception.type={config.interception.type}: set it to server")
        changes["interception"] = InterceptionServerConfig()
    for name, spec in agent_config_fields(config).items():
        key = f"{SECTION}.env.{name}"
        updates: dict[str, Any] = {"runtime": _choose_runtime(tasks, name, spec, key)}
        if name == role:
            if spec.client is not None or spec.model is not None or spec.retries != vf.RetryConfig():
                raise ValueError(f"{key} is the trained agent, so it has no model, client or retries; remove them")
            limits = [limit for limit in (spec.max_turns, cfg.max_turns) if limit is not None]
            timeout = spec.timeout.model_copy(update={"rollout": spec.timeout.rollout or cfg.agent_timeout})
            updates |= {"max_turns": min(limits), "timeout": timeout}
        elif spec.client is None:
            updates["client"] = UNTRAINED_CLIENT
        changes[name] = spec.model_copy(update=updates)
    return config.model_copy(update=changes)


def _choose_runtime(tasks: Tasks, name: str, spec: vf.AgentConfig, key: str) -> Any:
    """Return an agent's runtime. Raise ValueError if it is unset, but the agent executes programs, or is not safe."""
    if "runtime" not in spec.model_fields_set:
        harness = vf.load_harness(tasks.config.agent_harnesses()[name])
        if harness.EXECUTES_CODE:
            raise ValueError(
                f"{key}.runtime is unset, and {harness.config.id} executes the model's commands; set "
                f"{key}.runtime.type=docker, or subprocess for a model that may use all your files"
            )
        return vf.SubprocessConfig()
    is_harbor = any(kind.__module__.startswith("verifiers.v1.tasksets.harbor") for kind in tasks.task_type.__mro__)
    if is_harbor and isinstance(spec.runtime, vf.SubprocessConfig):
        raise ValueError(
            f"{key}.runtime.type=subprocess would run the tests of {tasks.name} as you, on this machine; set it to "
            "docker, or train with skyrl-agent train AGENT data.train_data=harbor:FOLDER"
        )
    return spec.runtime
