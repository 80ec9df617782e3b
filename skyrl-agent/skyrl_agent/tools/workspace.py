"""Tools that work in the trajectory's `Workspace`: a shell, an editor, a place to think, and submission."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_agent.tools.base import BaseTool, ToolUser, register_tool, text_parameters
from skyrl_agent.workspaces import FILE_TIMEOUT_S, Workspace, quote_path
from skyrl_gym.error import ToolFailure
from skyrl_gym.runtime.text import clean_text
from skyrl_gym.tools.calls import ToolCallError

COMMAND_TIMEOUT_S = 120.0
TOOL_TIMEOUT_SHARE = 0.9  # of `generator.tool_timeout`: a command is killed and reported before the call is abandoned
MAX_ENTRIES = 500  # of a directory
SNIPPET_LINES = 4  # shown before and after a change

COMMAND_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command, which may have several lines."},
        "timeout": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Seconds after which the command is killed.",
        },
    },
    "required": ["command"],
}

EDITOR_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {
            "type": "string",
            "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
            "description": "What to do.",
        },
        "path": {"type": "string", "description": "The file or directory."},
        "file_text": {"type": "string", "description": "For create: the content of the file."},
        "old_str": {"type": "string", "description": "For str_replace: the text to replace, with its indentation."},
        "new_str": {"type": "string", "description": "For str_replace and insert: the new text."},
        "insert_line": {"type": "integer", "description": "For insert: the line after which to insert; 0: first."},
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "minItems": 2,
            "maxItems": 2,
            "description": "For view: the first and last line, e.g. [11, 20]; -1 is the end.",
        },
    },
    "required": ["command", "path"],
}

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def workspace_of(agent: ToolUser, tool: BaseTool) -> Workspace:
    """Return a trajectory's workspace. Raises ToolFailure if its task has no workspace."""
    if not isinstance(runtime := agent.context.runtime, Workspace):
        raise ToolFailure(
            f"{tool.name} needs a task whose initialize_runtime returns a skyrl_agent.workspaces.Workspace, such as "
            f"SWEBenchTask; the runtime is {runtime!r}"
        )
    return runtime


def clean_output(text: str) -> str:
    """Return a program's output as plain text, without escape sequences and control characters."""
    plain = ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return clean_text(CONTROLS.sub("\ufffd", plain))


@register_tool("execute_bash")
class ExecuteBash(BaseTool):
    """A shell. Commands that exceed their time limit are killed, with a note in the result."""

    parameters = COMMAND_PARAMETERS

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Settings: `timeout` in seconds, for commands that set none."""
        super().__init__(settings)
        self._timeout_s = float(self.settings.pop("timeout", COMMAND_TIMEOUT_S))
        if self.settings:
            raise ValueError(f"execute_bash has no setting {next(iter(self.settings))!r}; it has timeout")
        self.description = (
            "Run a command with bash. Each command runs in a new shell in the folder of the repository: variables and "
            "cd do not last. It cannot read input. Programs in the background keep running; redirect their output to a "
            f"file. Commands that take longer than {self._timeout_s:g} seconds are killed, unless you set a timeout."
        )

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        limit_s = TOOL_TIMEOUT_SHARE * agent.context.settings.tool_timeout
        timeout_s = min(float(params.get("timeout", self._timeout_s)), limit_s)
        result = workspace_of(agent, self).execute(params["command"], timeout_s)
        if result.status is None:
            end = f"The command was killed because it took longer than {timeout_s:g} seconds."
        else:
            end = f"The command finished with exit status {result.status}."
        return f"{clean_output(result.output).rstrip()}\n[{end}]".lstrip("\n")


@register_tool("str_replace_editor")
class StrReplaceEditor(BaseTool):
    """An editor with the commands of Anthropic's text editor tool. Each trajectory has its own edit history."""

    description = (
        "View, create and edit text files. view shows a file with line numbers, or the files in a directory; create "
        "writes a new file; str_replace replaces a text that occurs exactly once; insert adds lines after a line; "
        "undo_edit takes back the last change of a file."
    )
    parameters = EDITOR_PARAMETERS

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Takes no settings."""
        super().__init__(settings)
        if self.settings:
            raise ValueError(f"str_replace_editor has no setting {next(iter(self.settings))!r}")
        self._history: dict[str, list[bytes]] = {}  # earlier contents by path

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        workspace, path = workspace_of(agent, self), params["path"]
        try:
            match params["command"]:
                case "view":
                    return self._view(workspace, path, params.get("view_range"))
                case "create":
                    return self._create(workspace, path, self._argument(params, "file_text"))
                case "str_replace":
                    return self._replace(workspace, path, self._argument(params, "old_str"), params.get("new_str", ""))
                case "insert":
                    line, text = self._argument(params, "insert_line"), self._argument(params, "new_str")
                    return self._insert(workspace, path, line, text)
            return self._undo(workspace, path)
        except OSError as error:
            raise ToolCallError(str(error)) from error

    def _argument(self, params: Mapping[str, Any], name: str) -> Any:
        if name not in params:
            raise ToolCallError(f"{params['command']} needs the parameter {name}.")
        return params[name]

    def _view(self, workspace: Workspace, path: str, view_range: list[int] | None) -> str:
        try:
            lines = _read_text(workspace, path).split("\n")
        except IsADirectoryError:
            return _list_directory(workspace, path)
        first, last = view_range or (1, len(lines))
        last = len(lines) if last == -1 else last
        if not 1 <= first <= last <= len(lines):
            raise ToolCallError(f"view_range={view_range} must be within the lines 1 to {len(lines)}.")
        return _number(lines, first, last)

    def _create(self, workspace: Workspace, path: str, text: str) -> str:
        try:
            workspace.read_bytes(path)
        except FileNotFoundError:
            workspace.write_bytes(path, _encode(text))
            return f"{path} was created."
        raise ToolCallError(f"{path} exists; edit it with str_replace, or write it with the shell.")

    def _replace(self, workspace: Workspace, path: str, old: str, new: str) -> str:
        text = _read_text(workspace, path)
        if not old:
            raise ToolCallError("old_str is empty; use insert.")
        if (n := text.count(old)) != 1:
            positions = [text.count("\n", 0, match.start()) + 1 for match in re.finditer(re.escape(old), text)]
            where = f": in the lines {', '.join(map(str, positions[:10]))}" if positions else ""
            hint = "add lines around it" if n else "copy it from the file, with its indentation"
            raise ToolCallError(f"old_str occurs {n} times in {path}{where}; it must occur once. To fix this, {hint}.")
        line = text.count("\n", 0, text.index(old)) + 1
        return self._write(workspace, path, text.replace(old, new), line, line + new.count("\n"))

    def _insert(self, workspace: Workspace, path: str, line: int, new: str) -> str:
        lines = _read_text(workspace, path).split("\n")
        n_lines = len(lines) - (lines[-1] == "")
        if not 0 <= line <= n_lines:
            raise ToolCallError(f"insert_line={line} must be between 0 and {n_lines}, the number of lines of {path}.")
        added = new.removesuffix("\n").split("\n")
        text = "\n".join([*lines[:line], *added, *lines[line:]])
        return self._write(workspace, path, text, line + 1, line + len(added))

    def _undo(self, workspace: Workspace, path: str) -> str:
        if not self._history.get(path):
            raise ToolCallError(f"There is no change of {path} to take back.")
        workspace.write_bytes(path, self._history[path].pop())
        return f"The last change of {path} was taken back."

    def _write(self, workspace: Workspace, path: str, text: str, first: int, last: int) -> str:
        """Write a file's changed text, and show lines `first` to `last` with some context."""
        before = workspace.read_bytes(path)
        uses_crlf = _uses_crlf(before)
        workspace.write_bytes(path, _encode(text.replace("\n", "\r\n") if uses_crlf else text))
        self._history.setdefault(path, []).append(before)
        lines = text.split("\n")
        shown = _number(lines, max(1, first - SNIPPET_LINES), min(len(lines), last + SNIPPET_LINES))
        return f"{path} was changed. The lines are now:\n{shown}"


def _read_text(workspace: Workspace, path: str) -> str:
    content = workspace.read_bytes(path)
    if b"\0" in content:
        raise ToolCallError(f"{path} is a binary file; use the shell to inspect it.")
    text = content.decode("utf-8", "surrogateescape")
    return text.replace("\r\n", "\n") if _uses_crlf(content) else text


def _uses_crlf(content: bytes) -> bool:
    """Return True if all lines end with CRLF. Models do not write it."""
    return b"\r\n" in content and content.count(b"\r\n") == content.count(b"\n")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _number(lines: list[str], first: int, last: int) -> str:
    return "\n".join(f"{i:6}\t{_display(line)}" for i, line in enumerate(lines[first - 1 : last], start=first))


def _display(line: str) -> str:
    """Return a line of a file that may not be valid UTF-8."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _list_directory(workspace: Workspace, path: str) -> str:
    find = f"find -H {quote_path(path)} -mindepth 1 -maxdepth 2 -not -path '*/.*' -printf '%P\\t%y\\n'"
    result = workspace.execute(f"{find} | LC_ALL=C sort | head -n {MAX_ENTRIES + 1}", FILE_TIMEOUT_S)
    found = [line.rpartition("\t") for line in result.output.splitlines()]
    entries = [f"{name}/" if kind == "d" else name for name, _, kind in found]
    more = [f"[only the first {MAX_ENTRIES} entries are shown]"] if len(entries) > MAX_ENTRIES else []
    return clean_output("\n".join([f"{path} has, to a depth of two:", *entries[:MAX_ENTRIES], *more]))


@register_tool("think")
class Think(BaseTool):
    """A scratchpad for thoughts. It has no side effects."""

    description = "Write down a thought, for example a plan or the causes that a failure may have. It changes nothing."
    parameters = text_parameters(thought="The thought.")

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        return "Your thought has been logged."


@register_tool("submit")
class Submit(BaseTool):
    """Finish with the state of the workspace as the result."""

    description = "Finish the task. The files as they are now are your result; nothing can follow."
    parameters = text_parameters(message="A short summary of what you did.") | {"required": []}
    ends_trajectory = True

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        return str(params.get("message", "")).strip()
