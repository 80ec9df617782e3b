"""The shell and the editor of agents, in a real folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_agent.config import AgentGeneration
from skyrl_agent.tools.base import BaseTool, create_tools
from skyrl_agent.tools.workspace import MAX_ENTRIES, clean_output
from skyrl_agent.workspaces import LocalWorkspace
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCallError


class Tools:
    """The tools of one trajectory."""

    def __init__(self, runtime: Any, **settings: Any) -> None:
        context = SimpleNamespace(runtime=runtime, settings=AgentGeneration(**settings))
        self._agent: Any = SimpleNamespace(context=context)
        self._tools = create_tools(["execute_bash", "str_replace_editor", "think", "submit"])
        self.folder = Path(runtime.cwd)

    def call(self, name: str, **arguments: Any) -> Any:
        tool: BaseTool = self._tools[name]
        return tool.call(tool.check(arguments), agent=self._agent, trajectory_id="t")

    def edit(self, command: str, path: str = "a.py", **arguments: Any) -> Any:
        return self.call("str_replace_editor", command=command, path=path, **arguments)

    def write(self, content: str | bytes, path: str = "a.py") -> None:
        (self.folder / path).write_bytes(content.encode() if isinstance(content, str) else content)

    def read(self, path: str = "a.py") -> str:
        return (self.folder / path).read_bytes().decode()


@pytest.fixture
def tools() -> Iterator[Tools]:
    workspace = LocalWorkspace()
    workspace.start()
    yield Tools(workspace)
    workspace.close()


def test_the_shell_reports_output_and_exit_status(tools: Tools) -> None:
    assert tools.call("execute_bash", command="echo a; exit 2") == "a\n[The command finished with exit status 2.]"
    assert tools.call("execute_bash", command="true") == "[The command finished with exit status 0.]"
    assert "command not found" in tools.call("execute_bash", command="nosuchcommand")


def test_equal_commands_have_equal_results(tools: Tools) -> None:
    assert tools.call("execute_bash", command="false; nosuch") == tools.call("execute_bash", command="false; nosuch")


def test_the_shell_says_that_a_command_was_killed(tools: Tools) -> None:
    result = tools.call("execute_bash", command="echo a; sleep 60", timeout="1")
    assert result == "a\n[The command was killed because it took longer than 1 seconds.]"


def test_the_time_limit_of_a_command_ends_before_that_of_the_call(tools: Tools) -> None:
    workspace = LocalWorkspace()
    workspace.start()
    result = Tools(workspace, tool_timeout=1).call("execute_bash", command="sleep 60", timeout=1000)
    workspace.close()
    assert result == "[The command was killed because it took longer than 0.9 seconds.]"


@pytest.mark.parametrize("timeout", ["0", "-1", "soon", "[1]"])
def test_time_limits_that_make_no_sense_are_explained(tools: Tools, timeout: str) -> None:
    with pytest.raises(ToolCallError, match="the arguments of execute_bash are wrong"):
        tools.call("execute_bash", command="true", timeout=timeout)


@pytest.mark.parametrize(
    ("output", "cleaned"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b", "ab"),
        ("10%\r20%\r\nend", "10%\n20%\nend"),
        ("a\0b\x07", "a\ufffdb\ufffd"),
        ("tab\tü\n", "tab\tü\n"),
        ("\ud83d", "?"),
    ],
)
def test_output_is_plain_text(output: str, cleaned: str) -> None:
    assert clean_output(output) == cleaned


def test_a_task_without_a_workspace_is_a_failure_that_names_the_tool() -> None:
    with pytest.raises(ToolFailure, match="execute_bash needs a task"):
        Tools(SimpleNamespace(cwd="/")).call("execute_bash", command="true")


def test_settings_that_do_not_exist_are_refused() -> None:
    assert "longer than 7 seconds" in create_tools([{"name": "execute_bash", "timeout": 7}])["execute_bash"].description
    for name in ("execute_bash", "str_replace_editor"):
        with pytest.raises(Exception, match="has no setting 'limit'"):
            create_tools([{"name": name, "limit": 7}])


def test_view_numbers_lines(tools: Tools) -> None:
    tools.write("a\nb\nc\n")
    assert tools.edit("view") == "     1\ta\n     2\tb\n     3\tc\n     4\t"
    assert tools.edit("view", view_range="[2, 3]") == "     2\tb\n     3\tc"
    assert tools.edit("view", view_range=[3, -1]).startswith("     3\tc")
    assert tools.edit("view", path=str(tools.folder / "a.py"), view_range=[1, 1]) == "     1\ta"


@pytest.mark.parametrize("view_range", [[0, 1], [3, 2], [1, 9], [-1, 1]])
def test_view_explains_lines_that_do_not_exist(tools: Tools, view_range: list[int]) -> None:
    tools.write("a\nb")
    with pytest.raises(ToolCallError, match="must be within the lines 1 to 2"):
        tools.edit("view", view_range=view_range)


def test_view_lists_a_directory_to_a_depth_of_two(tools: Tools) -> None:
    tools.call("execute_bash", command="mkdir -p src/deep/deeper .git; touch b src/a src/deep/x .git/x")
    assert tools.edit("view", path=".") == ". has, to a depth of two:\nb\nsrc/\nsrc/a\nsrc/deep/"
    tools.call("execute_bash", command=f"mkdir -p -- '-many'; cd -- -many; touch $(seq {MAX_ENTRIES + 5})")
    listed = tools.edit("view", path="-many").splitlines()
    assert len(listed) == MAX_ENTRIES + 2
    assert listed[-1] == f"[only the first {MAX_ENTRIES} entries are shown]"


def test_create_writes_new_files_only(tools: Tools) -> None:
    assert tools.edit("create", path="new/ü.py", file_text="x = 1\n") == "new/ü.py was created."
    assert tools.read("new/ü.py") == "x = 1\n"
    with pytest.raises(ToolCallError, match="exists; edit it"):
        tools.edit("create", path="new/ü.py", file_text="")
    with pytest.raises(ToolCallError, match="is a directory"):
        tools.edit("create", path="new", file_text="")


def test_str_replace_replaces_a_text_that_occurs_once(tools: Tools) -> None:
    lines = [f"line {i}\n" for i in range(1, 21)]
    tools.write("".join(lines))
    result = tools.edit("str_replace", old_str="line 10\nline 11", new_str="ten\neleven\nmore")
    assert tools.read() == "".join([*lines[:9], "ten\neleven\nmore\n", *lines[11:]])
    assert result.splitlines()[1:] == [
        *(f"     {i}\tline {i}" for i in range(6, 10)),
        *("    10\tten", "    11\televen", "    12\tmore"),
        *(f"    {i + 1}\tline {i}" for i in range(12, 16)),
    ]
    tools.edit("str_replace", old_str="line 1\n")
    assert tools.read().startswith("line 2\n")


def test_str_replace_explains_why_it_cannot_replace(tools: Tools) -> None:
    tools.write("a\nb\na\n")
    with pytest.raises(ToolCallError, match=r"occurs 2 times in a.py: in the lines 1, 3"):
        tools.edit("str_replace", old_str="a", new_str="b")
    with pytest.raises(ToolCallError, match=r"occurs 0 times in a.py; .* with its indentation"):
        tools.edit("str_replace", old_str="c", new_str="b")
    with pytest.raises(ToolCallError, match="old_str is empty"):
        tools.edit("str_replace", old_str="", new_str="b")
    with pytest.raises(ToolCallError, match=r"none.py does not exist"):
        tools.edit("str_replace", path="none.py", old_str="a", new_str="b")
    assert tools.read() == "a\nb\na\n"


@pytest.mark.parametrize(
    ("before", "line", "after"),
    [
        ("a\nb\n", 0, "new\na\nb\n"),
        ("a\nb\n", 2, "a\nb\nnew\n"),
        ("a\nb", 2, "a\nb\nnew"),
        ("", 0, "new\n"),
    ],
)
def test_insert_adds_lines_after_a_line(tools: Tools, before: str, line: int, after: str) -> None:
    tools.write(before)
    tools.edit("insert", insert_line=str(line), new_str="new")
    assert tools.read() == after


def test_insert_explains_a_line_that_does_not_exist(tools: Tools) -> None:
    tools.write("a\nb\n")
    for line in (-1, 3):
        with pytest.raises(ToolCallError, match="must be between 0 and 2"):
            tools.edit("insert", insert_line=line, new_str="new")


def test_undo_takes_back_one_change_at_a_time(tools: Tools) -> None:
    tools.write("a\n")
    tools.edit("str_replace", old_str="a", new_str="b")
    tools.edit("insert", insert_line=1, new_str="c")
    assert tools.edit("undo_edit") == "The last change of a.py was taken back."
    assert tools.read() == "b\n"
    tools.edit("undo_edit")
    assert tools.read() == "a\n"
    with pytest.raises(ToolCallError, match=r"no change of a.py to take back"):
        tools.edit("undo_edit")


@pytest.mark.parametrize(
    ("command", "missing"),
    [("create", "file_text"), ("str_replace", "old_str"), ("insert", "insert_line")],
)
def test_missing_parameters_are_named(tools: Tools, command: str, missing: str) -> None:
    with pytest.raises(ToolCallError, match=f"{command} needs the parameter {missing}"):
        tools.edit(command)


def test_edits_keep_line_ends_and_bytes_that_are_not_utf_8(tools: Tools) -> None:
    tools.write(b"a\r\nb\r\n\xff\r\n")
    tools.edit("str_replace", old_str="a\nb", new_str="c\nd")
    assert (tools.folder / "a.py").read_bytes() == b"c\r\nd\r\n\xff\r\n"
    assert tools.edit("view").endswith("     3\t\ufffd\n     4\t")
    tools.write(b"a\r\nb\n")
    tools.edit("str_replace", old_str="b", new_str="c")
    assert (tools.folder / "a.py").read_bytes() == b"a\r\nc\n"


def test_edits_keep_the_mode_of_a_file(tools: Tools) -> None:
    tools.write("a\n")
    (tools.folder / "a.py").chmod(0o755)
    tools.edit("str_replace", old_str="a", new_str="b")
    assert (tools.folder / "a.py").stat().st_mode & 0o777 == 0o755


def test_binary_files_special_files_and_odd_paths_are_explained(tools: Tools) -> None:
    tools.write(b"\x7fELF\0")
    with pytest.raises(ToolCallError, match="is a binary file"):
        tools.edit("view")
    with pytest.raises(ToolCallError, match="is not a regular file"):
        tools.edit("view", path="/dev/zero")
    with pytest.raises(ToolCallError, match="is not a path"):
        tools.edit("view", path="")
    with pytest.raises(ToolCallError, match="does not exist"):
        tools.edit("view", path="$(touch pwned)")
    with pytest.raises(ToolCallError, match="cannot be written"):
        tools.edit("create", path="a.py/b.py", file_text="")
    assert not (tools.folder / "pwned").exists()


def test_think_and_submit(tools: Tools) -> None:
    assert tools.call("think", thought="hm") == "Your thought has been logged."
    assert tools.call("submit", message=" done ") == "done"
    assert tools.call("submit") == ""
