"""Settings of a harness: an agent's program, its workspace, its limits and its grader."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Gt
from pydantic import Field, model_validator

from skyrl_agent.config import load_section
from skyrl_agent.harness.known import AGENTS
from skyrl_train.config.base import Count, Section
from skyrl_train.errors import ConfigError

START_TIMEOUT_S, MARGIN_S = 600.0, 60.0
VERIFIERS = "verifiers"
"""The harness that leaves programs, runtimes and graders to verifiers environments."""

OF_VERIFIERS = {"harness", "max_turns", "agent_timeout", "max_concurrent_agents", "trains_side_requests"}
Failure = Literal["turn_limit", "agent_timeout", "agent_exit", "agent_killed", "agent_output"]


class WorkspaceConfig(Section):
    """Where the agent works. Each trajectory gets a new workspace, which is removed afterwards."""

    kind: Literal["isolated", "docker", "podman", "unisolated"] = "isolated"
    """isolated: a folder on this machine, in Linux namespaces without a network. docker, podman: a container without a
    network. unisolated: a folder on this machine without any protection of your files."""

    image: str | None = None
    """Image of containers. A row's column `image` overrides it."""

    cwd: str = "/workspace"
    """Working directory. Unused if kind=unisolated."""

    network: bool = False
    """Let containers use the network. kind=docker and podman only."""

    ignore_dockerfile: bool = False
    """Run Harbor tasks without their image, with the programs of this machine. The other files of `environment` are
    copied to the working directory. kind=isolated only."""

    path: tuple[str, ...] = ()
    """Folders of this machine with the agent's program. Defaults to the folders of PATH. kind=isolated only."""

    readable: tuple[str, ...] = ()
    """More folders of this machine that the agent can read. kind=isolated only."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        of_machine = {"path": self.path, "readable": self.readable, "ignore_dockerfile": self.ignore_dockerfile}
        if self.kind != "isolated" and (names := [name for name, value in of_machine.items() if value]):
            raise ValueError(f"kind={self.kind} takes no {' and no '.join(names)}; remove it, or set kind=isolated")
        of_containers = {"image": self.image, "network": self.network}
        if self.kind not in ("docker", "podman") and (
            names := [name for name, value in of_containers.items() if value]
        ):
            raise ValueError(f"{' and '.join(names)} need kind=docker or kind=podman")
        if not self.cwd.startswith("/"):
            raise ValueError(f"cwd={self.cwd} must be an absolute path")
        return self


class HarnessConfig(Section):
    """Settings of a harness file."""

    harness: str | tuple[str, ...]
    """The agent: the name of a known one (mini-swe-agent, pi, opencode, codex, claude-code), a list of arguments,
    a shell command, a Python function as `module:function`, or verifiers for the agents of verifiers environments."""

    arguments: tuple[str, ...] = ()
    """More arguments, before the task."""

    env: dict[str, str] = Field(default={})
    """More environment variables. The agent gets none of this process's."""

    files: dict[str, str] = Field(default={})
    """Texts of files to write before the agent starts. Relative paths start at the working directory, {home} is the
    agent's home folder."""

    workspace: WorkspaceConfig = WorkspaceConfig()
    """Where the agent works."""

    verifier: str | None = None
    """Grader of rows without a column `verifier`: a shell command for the workspace, or a Python function as
    `module:function`."""

    pass_env: tuple[str, ...] = ()
    """Variables of this process that `[verifier].env` and `[environment].env` of Harbor tasks may use."""

    max_turns: Count = 50
    """Maximum number of requests to the model. The next one ends the agent with `turn_limit`."""

    agent_timeout: Annotated[float, Gt(0)] = 900.0
    """Seconds until the agent is killed with `agent_timeout`. A Harbor task's `[agent].timeout_sec` overrides it."""

    verifier_timeout: Annotated[float, Gt(0)] = 300.0
    """Seconds until the grader is killed. A Harbor task's `[verifier].timeout_sec` overrides it."""

    max_output_bytes: Count = 64 << 20
    """Bytes that the agent may print until it is killed with `agent_output`. Only the last ones are kept."""

    graded_failures: tuple[Failure, ...] = ("turn_limit",)
    """Failures after which the workspace is graded as usual. All others make the trajectory invalid."""

    max_concurrent_agents: Count = 16
    """Maximum number of agents at once."""

    trains_side_requests: bool = False
    """Train on replies to requests without tools, such as titles, even if the agent offers tools."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.harness:
            raise ValueError(f"harness is empty; name one of {', '.join(AGENTS)}, or a command")
        if self.arguments and not isinstance(self.harness, tuple) and self.harness not in AGENTS:
            raise ValueError(f"arguments apply to known agents and lists; append them to harness={self.harness!r}")
        if self.harness == VERIFIERS and (unused := sorted(self.model_fields_set - OF_VERIFIERS)):
            raise ValueError(
                f"{', '.join(unused)}: environments of verifiers have their own programs, runtimes and graders; set "
                "environment.skyrl_gym.verifiers.env instead"
            )
        return self

    @property
    def function(self) -> str | None:
        """The path of the agent's Python function, or None for a program."""
        return self.harness if isinstance(self.harness, str) and is_function(self.harness) else None

    @property
    def trajectory_timeout(self) -> float:
        """Seconds for a whole trajectory."""
        return START_TIMEOUT_S + self.agent_timeout + self.verifier_timeout + MARGIN_S

    @classmethod
    def load(cls, source: str | Path) -> HarnessConfig:
        """Read a harness file, or return the defaults of a known agent.

        Raises:
            ConfigError: it is neither, or the file is invalid. The error lists every problem.
        """
        if str(source) in (*AGENTS, VERIFIERS):
            return cls(harness=str(source))
        if not Path(source).is_file():
            raise ConfigError(f"{source} is neither a file nor a known agent ({', '.join((*AGENTS, VERIFIERS))})")
        return load_section(cls, Path(source))


def is_function(text: str) -> bool:
    """Return True for `module:function`."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))
