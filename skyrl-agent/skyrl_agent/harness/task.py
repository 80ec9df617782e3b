"""Tasks of rows: instruction, files and grader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_agent.harness.config import HarnessConfig
from skyrl_agent.harness.harbor import HarborTask, image_workdir
from skyrl_train.errors import DataError
from skyrl_train.types import PromptRow

MAX_TASK_BYTES = 100_000  # Linux allows 128 KiB per argument and environment variable
COLUMNS = ("files", "verifier", "verifier_files", "image", "harbor")


@dataclass(frozen=True, slots=True)
class HarnessTask:
    """A task whose files have not been copied to a workspace yet."""

    instruction: str
    verifier: str  # a shell command or module:function
    cwd: str
    agent_timeout: float
    verifier_timeout: float
    files: Mapping[str, str] = field(default_factory=dict)
    verifier_files: Mapping[str, str] = field(default_factory=dict)  # the agent does not see them
    image: str | None = None
    run_args: tuple[str, ...] = ()  # of the container
    env: Mapping[str, str] = field(default_factory=dict)
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    environment: Path | None = None  # Harbor: copied to the working directory
    tests: Path | None = None  # Harbor: copied to /tests after the agent

    @classmethod
    def from_row(cls, row: PromptRow, cfg: HarnessConfig) -> HarnessTask:
        """Read a row: `prompt` is one user message, and `COLUMNS` are optional.

        Raises:
            DataError: the row is not a task, or needs something that the workspace lacks.
        """
        extras = row.env_extras
        if (folder := extras.get("harbor")) is not None:
            return cls.from_harbor(HarborTask.read(Path(folder)), cfg)
        if len(row.prompt) != 1 or row.prompt[0]["role"] != "user":
            raise DataError("prompt must be one user message, because the agent writes its own system message")
        verifier = extras.get("verifier") or cfg.verifier
        if not isinstance(verifier, str):
            raise DataError("there is no grader; add the column verifier, or set verifier in the harness file")
        task = cls(
            check_instruction(_text(row.prompt[0]["content"])),
            verifier,
            cfg.workspace.cwd,
            cfg.agent_timeout,
            cfg.verifier_timeout,
            _read_files(extras, "files"),
            _read_files(extras, "verifier_files"),
            extras.get("image") or cfg.workspace.image,
        )
        if (cfg.workspace.kind in ("docker", "podman")) != (task.image is not None):
            raise DataError(
                f"image={task.image} with workspace.kind={cfg.workspace.kind}: containers need an image, and nothing "
                "else takes one"
            )
        return task

    @classmethod
    def from_harbor(cls, task: HarborTask, cfg: HarnessConfig) -> HarnessTask:
        """Read a Harbor task. Raises DataError if it needs something that the workspace lacks."""
        workspace, settings = cfg.workspace, task.settings
        task.check(workspace, cfg.pass_env)
        has_image = workspace.kind in ("docker", "podman")
        return cls(
            check_instruction(task.instruction),
            "bash /tests/test.sh",
            settings.environment.workdir or (image_workdir(workspace.kind, task.image) if has_image else "/app"),
            settings.agent.timeout_sec or cfg.agent_timeout,
            settings.verifier.timeout_sec or cfg.verifier_timeout,
            image=task.image if has_image else None,
            run_args=task.run_args if has_image else (),
            env=task.resolve_env(settings.environment.env, cfg.pass_env),
            verifier_env=task.resolve_env(settings.verifier.env, cfg.pass_env),
            environment=None if has_image else task.folder / "environment",
            tests=task.folder / "tests",
        )


def check_instruction(text: str) -> str:
    """Return an instruction. Raise DataError if it cannot be an argument of a program."""
    if not text.strip() or "\0" in text or len(text.encode("utf-8", "replace")) > MAX_TASK_BYTES:
        raise DataError(
            f"the instruction has {len(text):,} characters: it is an argument of the agent, so it must have text, no "
            f"null character and at most {MAX_TASK_BYTES:,} bytes; write long texts to files"
        )
    return text


def _text(content: Any) -> str:
    """Return the text of a message. Raises DataError if it has other content, such as an image."""
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content]
    if None in parts:
        raise DataError("prompt has an image, but agents start with text only; write the image to a file")
    return "\n".join(parts)


def _read_files(extras: Mapping[str, Any], column: str) -> dict[str, str]:
    """Return a column {path: text}, or JSON of it. Parquet files add null values, which are ignored."""
    value = extras.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{column} is not JSON: {error}") from error
    files = {} if value is None else value
    if not isinstance(files, Mapping) or not all(isinstance(text, str | None) for text in files.values()):
        raise DataError(f"{column}={files!r} must be a mapping of paths to texts")
    return {str(path): text for path, text in files.items() if text is not None}
