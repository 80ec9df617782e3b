"""The agent function of a harness: run an agent's program in a workspace, and grade the result."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from transformers import PreTrainedTokenizerBase

from skyrl_agent.agent_generator import AgentGenerator, AgentResult, NoReward
from skyrl_agent.harness.config import START_TIMEOUT_S, Failure, HarnessConfig
from skyrl_agent.harness.gateway import Gateway
from skyrl_agent.harness.grading import grade
from skyrl_agent.harness.harbor import HarborTask
from skyrl_agent.harness.known import AGENTS, KnownAgent
from skyrl_agent.harness.task import HarnessTask
from skyrl_agent.loading import load_function
from skyrl_agent.workspaces import (
    TERMINATE_S,
    ContainerWorkspace,
    IsolatedWorkspace,
    LocalWorkspace,
    Workspace,
    WorkspaceError,
    in_thread,
    open_workspace,
)
from skyrl_gym.isolation.command import NOT_ISOLATED, PORT
from skyrl_gym.runtime.text import describe_error
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators.rollout import Rollout
from skyrl_train.inference_engines.base import InferenceEngine, SamplingParams
from skyrl_train.types import PromptRow, StopReason
from skyrl_train.types.tokens import Phase

PLACEHOLDER = re.compile(r"(?<!\{)\{(task|model|base_url|origin|api_key|home|cwd)\}(?!\})")  # {{…}} is Jinja
TAIL_BYTES = 4000  # of the agent's output, for messages
CHUNK_BYTES = 1 << 20
DRAIN_S = 1.0  # for the output of a program that has ended
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib")


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How an agent's program ended. `failure` is None after exit status 0."""

    failure: str | None
    reason: str
    n_bytes: int = 0  # of output
    seconds: float = 0.0


class TaskAgent(ABC):
    """An agent for `AgentGenerator` with the settings of a harness file."""

    cfg: HarnessConfig

    @abstractmethod
    def check_row(self, row: PromptRow) -> None:
        """Check that a row is a task, and build its image. Raise DataError if it is not."""

    @abstractmethod
    async def __call__(
        self, *, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str
    ) -> AgentResult:
        """Play the task of a row. Raise NoReward, with the failure as the stop reason, if it cannot be graded."""

    async def close(self) -> None:  # noqa: B027, optional
        """Release what the agent shares between tasks."""


class HarnessAgent(TaskAgent):
    """An agent for `AgentGenerator`: each call works in a new workspace and gives the reward of its verifier."""

    def __init__(self, cfg: HarnessConfig) -> None:
        """Find the agent's program.

        Raises:
            ConfigError: it does not exist, or this machine cannot isolate it.
        """
        self.cfg = cfg
        self._path: tuple[str, ...] = ()
        self._readable = cfg.workspace.readable
        command = cfg.harness if isinstance(cfg.harness, tuple) else ("bash", "-c", cfg.harness)
        self._agent = AGENTS.get(str(cfg.harness)) or KnownAgent(command)
        self._function = None
        if cfg.function is not None:
            try:
                self._function = load_function(cfg.function)
            except ValueError as error:
                raise ConfigError(f"harness={error}") from error
            if inspect.iscoroutinefunction(self._function):
                raise ConfigError(
                    f"harness={cfg.function} is a coroutine function; write a plain one, it gets a thread"
                )
        elif cfg.workspace.kind in ("isolated", "unisolated"):
            self._find_program()
        if cfg.workspace.kind == "isolated":
            try:
                IsolatedWorkspace.check()
            except (WorkspaceError, OSError) as error:
                raise ConfigError(
                    f"workspace.kind=isolated, but this machine cannot isolate programs: {error}. Let users create "
                    "namespaces, set workspace.kind=docker, or, for models that you trust, workspace.kind=unisolated"
                ) from error

    def check_row(self, row: PromptRow) -> None:
        """Check that a row is a task, and build or pull the image of a Harbor task. Raise DataError if it is not."""
        folder = row.env_extras.get("harbor")
        if folder is not None and self.cfg.workspace.kind in ("docker", "podman"):
            task = HarborTask.read(Path(folder))
            task.check(self.cfg.workspace, self.cfg.pass_env)
            task.build_image(self.cfg.workspace.kind)
        HarnessTask.from_row(row, self.cfg)

    async def __call__(
        self, *, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str
    ) -> AgentResult:
        """Play the task of a row. Raise NoReward, with the failure as the stop reason, if it cannot be graded."""
        task = HarnessTask.from_row(row, self.cfg)
        workspace = self._new_workspace(task)
        try:
            async with open_workspace(workspace, START_TIMEOUT_S, partial(self._prepare, task=task)):
                async with Gateway(base_url, self.cfg.max_turns, workspace.socket) as gateway:
                    origin = gateway.origin or f"http://127.0.0.1:{PORT}"
                    values = {"task": task.instruction, "model": model, "base_url": f"{origin}/v1", "origin": origin}
                    values |= {"api_key": api_key, "home": workspace.home, "cwd": workspace.cwd}
                    end = await self._run(workspace, task, gateway, values, row)
                await in_thread(workspace.end_programs)
                if gateway.n_turns == 0 and end.failure is None:
                    end = replace(
                        end, failure=StopReason.AGENT_SILENT, reason=f"never called the model, and {end.reason}"
                    )
                if end.failure is not None and end.failure not in self.cfg.graded_failures:
                    raise NoReward(end.failure, f"the agent {end.reason}")
                result = await in_thread(partial(grade, workspace, task, row))
        except WorkspaceError as error:
            raise NoReward("workspace_error", str(error)) from error
        except OSError as error:  # files, sockets and processes of the workspace
            raise NoReward("workspace_error", describe_error(error)) from error
        metrics: dict[str, float] = {
            "requests": gateway.n_turns,
            "output_bytes": end.n_bytes,
            "agent_seconds": end.seconds,
        }
        metrics |= {str(name): float(end.failure == name) for name in self.cfg.graded_failures}
        return replace(result, metrics={**metrics, **result.metrics})

    def _new_workspace(self, task: HarnessTask) -> Workspace:
        cfg = self.cfg.workspace
        match cfg.kind:
            case "isolated":
                return IsolatedWorkspace(task.cwd, self._readable, self._path, ["/logs"])
            case "unisolated":
                return LocalWorkspace()
        network = [] if cfg.network else ["--network", "none"]
        settings = {"executable": cfg.kind, "run_args": ["--rm", *network, *task.run_args]}
        return ContainerWorkspace(str(task.image), task.cwd, settings, has_socket=True)

    def _prepare(self, workspace: Workspace, task: HarnessTask) -> None:
        """Copy the task's files into the workspace."""
        if task.environment is not None and task.environment.is_dir():
            workspace.upload(task.environment, "/environment")
            workspace.run("cp -a /environment/. . && rm -rf Dockerfile /environment/*")
        for path, text in task.files.items():
            workspace.write_bytes(path, text.encode())

    async def _run(
        self, workspace: Workspace, task: HarnessTask, gateway: Gateway, values: Mapping[str, str], row: PromptRow
    ) -> ProgramEnd:
        agent = self._agent
        for path, text in {**agent.files, **self.cfg.files}.items():
            write = partial(workspace.write_bytes, fill(path, values), fill(text, values).encode())
            await in_thread(write)
        if self._function is not None:
            return await self._call(workspace, task, values, row)
        *options, last = agent.command
        argv = [fill(part, values) for part in (*options, *self.cfg.arguments, last)]
        env = {
            "OPENAI_BASE_URL": values["base_url"],
            "OPENAI_API_KEY": values["api_key"],
            "ANTHROPIC_BASE_URL": values["origin"],
            "ANTHROPIC_API_KEY": values["api_key"],
            "MODEL": values["model"],
            "TASK": values["task"],
            "NO_COLOR": "1",
            "TERM": "dumb",
            **task.env,
            **{name: fill(value, values) for name, value in {**agent.env, **self.cfg.env}.items()},
        }
        return await run_program(
            workspace, argv, env, gateway.turn_limit, task.agent_timeout, self.cfg.max_output_bytes
        )

    async def _call(
        self, workspace: Workspace, task: HarnessTask, values: Mapping[str, str], row: PromptRow
    ) -> ProgramEnd:
        """Call the agent's Python function in a thread. A call beyond its time limit is abandoned."""
        assert self._function is not None
        names = ("base_url", "api_key", "model")
        call = partial(self._function, row=row, workspace=workspace, **{name: values[name] for name in names})
        started = time.perf_counter()
        try:
            await in_thread(call, task.agent_timeout)
        except TimeoutError:
            return ProgramEnd("agent_timeout", f"did not return within {task.agent_timeout:g} s")
        except Exception as error:  # noqa: BLE001, the boundary of user code
            return ProgramEnd("agent_exit", f"raised {describe_error(error)}")
        return ProgramEnd(None, "returned", seconds=time.perf_counter() - started)

    def _find_program(self) -> None:
        """Find the program and the folders that it needs."""
        argv = self._agent.command
        folders = [*self.cfg.workspace.path, str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        program = shutil.which(argv[0], path=":".join(folders))
        if program is None:
            install = f"install it ({self._agent.install})" if self._agent.install else "install it"
            raise ConfigError(
                f"harness={self.cfg.harness}: there is no program {argv[0]}; {install}, or set workspace.path"
            )
        paths = dict.fromkeys((*self.cfg.workspace.path, str(Path(program).parent)))
        self._path = tuple(path for path in paths if not path.startswith(SYSTEM_FOLDERS))
        installed = [folder for path in (*self._path, program) for folder in install_folders(Path(path))]
        self._readable = tuple(dict.fromkeys((*self.cfg.workspace.readable, *installed)))


class HarnessGenerator(AgentGenerator):
    """An `AgentGenerator` whose metrics count failed attempts, including retried and graded ones."""

    def __init__(
        self,
        agent: TaskAgent,
        generator_cfg: GeneratorConfig,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        in_own_process: bool = True,
    ) -> None:
        """Prepare the server, with the limits of the harness file."""
        super().__init__(
            agent,
            generator_cfg,
            engine,
            tokenizer,
            max_concurrent_agents=agent.cfg.max_concurrent_agents,
            in_own_process=in_own_process,
            trains_side_requests=agent.cfg.trains_side_requests,
        )
        self._task_agent = agent
        self._failures: dict[Phase, Counter[str]] = {"train": Counter(), "eval": Counter()}

    def take_metrics(self, phase: Phase = "train") -> dict[str, float]:
        """Return `agent/*` and `agent/failures/*`."""
        failures = self._failures[phase]
        self._failures[phase] = Counter()
        return super().take_metrics(phase) | {f"agent/failures/{name}": float(n) for name, n in failures.items()}

    async def close(self) -> None:
        """Close the server, end all threads, and close the agent."""
        await super().close()
        await self._task_agent.close()

    async def _play(self, sampling: SamplingParams, rollout: Rollout) -> None:
        await super()._play(sampling, rollout)
        graded = [name for name in get_args(Failure) if rollout.env_metrics.get(name)]
        self._failures[rollout.request.id.phase].update([str(rollout.stop_reason)] if rollout.error else graded)


async def run_program(
    workspace: Workspace,
    argv: Sequence[str],
    env: Mapping[str, str],
    turn_limit: asyncio.Event,
    timeout_s: float,
    max_output_bytes: int,
) -> ProgramEnd:
    """Run a program in a workspace until it ends or exceeds a limit. It is dead afterwards, whatever happens."""
    launch = workspace.launch(argv, env)
    started, output = time.perf_counter(), _Output(max_output_bytes)
    process = await asyncio.create_subprocess_exec(
        *launch.argv,
        cwd=launch.cwd,
        env=launch.env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        limit=CHUNK_BYTES,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reading = asyncio.create_task(output.read(process.stdout))
    waits = {
        "exit": asyncio.create_task(process.wait()),
        "turn_limit": asyncio.create_task(turn_limit.wait()),
        "agent_output": asyncio.create_task(output.flooded.wait()),
    }
    try:
        with suppress(OSError):  # it has ended already
            process.stdin.write(launch.stdin)
            await process.stdin.drain()
            process.stdin.close()
        done, _ = await asyncio.wait(waits.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        ended = next((name for name, task in waits.items() if task in done), "agent_timeout")
    finally:
        await _end(process, is_isolated=bool(launch.stdin))
        await asyncio.wait((reading,), timeout=DRAIN_S)  # a background process may keep the pipe open
        for task in (reading, *waits.values()):
            task.cancel()
        await asyncio.gather(reading, *waits.values(), return_exceptions=True)
    seconds = time.perf_counter() - started
    if ended == "exit":
        return replace(_describe_exit(process.returncode, output.text), n_bytes=output.n_bytes, seconds=seconds)
    reason = {
        "turn_limit": "reached its turn limit",
        "agent_output": f"printed more than {max_output_bytes:,} bytes",
        "agent_timeout": f"did not finish within {timeout_s:g} s",
    }[ended]
    return ProgramEnd(ended, f"{reason}; its last output: {output.text}", output.n_bytes, seconds)


class _Output:
    """The last bytes of a program's output, and their number."""

    def __init__(self, max_bytes: int) -> None:
        self.n_bytes, self._tail, self._max_bytes = 0, b"", max_bytes
        self.flooded = asyncio.Event()

    @property
    def text(self) -> str:
        return self._tail.decode("utf-8", "replace").strip()[-1000:]

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(CHUNK_BYTES):
            self.n_bytes += len(chunk)
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if self.n_bytes > self._max_bytes:
                self.flooded.set()


def _describe_exit(status: int | None, output: str) -> ProgramEnd:
    assert status is not None
    if status == NOT_ISOLATED and "cannot isolate" in output:
        raise WorkspaceError(output)
    if status == 0:
        return ProgramEnd(None, f"ended with status 0; its last output: {output}")
    if status in (126, 127):
        raise WorkspaceError(f"the agent could not be started: {output}")
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return ProgramEnd("agent_killed", f"was killed by {signal.Signals(number).name}; its last output: {output}")
    return ProgramEnd("agent_exit", f"ended with status {status}; its last output: {output}")


async def _end(process: asyncio.subprocess.Process, *, is_isolated: bool) -> None:
    """End a process and its group. An isolated process first ends everything in its namespace."""
    if is_isolated and process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), TERMINATE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of a text."""
    return PLACEHOLDER.sub(lambda match: values[match[1]], text)


def install_folders(path: Path) -> list[str]:
    """Return the folders that a program needs: its virtual environment with its Python, its `node_modules`, or its own.

    >>> install_folders(Path("/usr/bin/env"))
    []
    """
    found = []
    for folder in {parent for start in (path.absolute(), path.resolve()) for parent in (start, *start.parents)}:
        if (folder / "pyvenv.cfg").is_file():
            python = (folder / "bin/python").resolve()
            found += [folder, folder.resolve(), python.parents[1]]
        elif folder.name == "node_modules":
            found += [folder, folder.resolve()]
    if not found:
        found = [path.parent if path.is_file() else path, path.resolve().parent]
    return sorted({str(folder) for folder in found if not str(folder).startswith(SYSTEM_FOLDERS)})
