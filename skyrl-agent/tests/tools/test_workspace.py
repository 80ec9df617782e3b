"""The shell and the editor of agents, in a real folder."""

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

    def bash(self, command: str, **arguments: Any) -> Any:
        return self.call("execute_bash", command=command, **arguments)

    def write(self, content: str | bytes) -> None:
        (self.folder / "a.py").write_bytes(content.encode() if isinstance(content, str) else content)

    def read(self, path: str = "a.py") -> str:
        return (self.folder / path).read_bytes().decode()

    def refuse(self, message: str, command: str, **arguments: Any) -> None:
        """Assert that the editor refuses a command with this message."""
        with pytest.raises(ToolCallError, match=message):
            self.edit(command, **arguments)


@pytest.fixture
def tools(local_workspace: LocalWorkspace) -> Tools:
    return Tools(local_workspace)


def test_the_shell_reports_output_exit_status_and_timeouts(tools: Tools, local_workspace: LocalWorkspace) -> None:
    assert tools.bash("echo a; exit 2") == "a\n[The command finished with exit status 2.]"
    assert tools.bash("true") == "[The command finished with exit status 0.]"
    assert "command not found" in tools.bash("nosuchcommand")
    assert tools.bash("false; nosuch") == tools.bash("false; nosuch"), "equal commands have equal results"
    # A command always times out before its tool call does.
    result = tools.bash("echo a; sleep 60", timeout="1")
    assert result == "a\n[The command was killed because it took longer than 1 seconds.]"
    result = Tools(local_workspace, tool_timeout=1).bash("sleep 60", timeout=1000)
    assert result == "[The command was killed because it took longer than 0.9 seconds.]"


@pytest.mark.parametrize("timeout", ["0", "-1", "soon", "[1]"])
def test_time_limits_that_make_no_sense_are_explained(tools: Tools, timeout: str) -> None:
    with pytest.raises(ToolCallError, match="the arguments of execute_bash are wrong"):
        tools.bash("true", timeout=timeout)


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
        Tools(SimpleNamespace(cwd="/")).bash("true")


def test_settings_that_do_not_exist_are_refused() -> None:
    assert "longer than 7 seconds" in create_tools([{"name": "execute_bash", "timeout": 7}])["execute_bash"].description
    for name in ("execute_bash", "str_replace_editor"):
        with pytest.raises(Exception, match="has no setting 'limit'"):
            create_tools([{"name": name, "limit": 7}])


def test_view_numbers_lines_and_lists_directories(tools: Tools) -> None:
    tools.write("a\nb\nc\n")
    assert tools.edit("view") == "     1\ta\n     2\tb\n     3\tc\n     4\t"
    assert tools.edit("view", view_range="[2, 3]") == "     2\tb\n     3\tc"
    assert tools.edit("view", view_range=[3, -1]).startswith("     3\tc")
    assert tools.edit("view", path=str(tools.folder / "a.py"), view_range=[1, 1]) == "     1\ta"
    for view_range in ([0, 1], [3, 2], [1, 9], [-1, 1]):
        tools.refuse("must be within the lines 1 to 4", "view", view_range=view_range)
    tools.bash("mkdir -p src/deep/deeper .git; touch b src/a src/deep/x .git/x")
    assert tools.edit("view", path=".") == ". has, to a depth of two:\na.py\nb\nsrc/\nsrc/a\nsrc/deep/"
    tools.bash(f"mkdir -p -- '-many'; cd -- -many; touch $(seq {MAX_ENTRIES + 5})")
    listed = tools.edit("view", path="-many").splitlines()
    assert len(listed) == MAX_ENTRIES + 2
    assert listed[-1] == f"[only the first {MAX_ENTRIES} entries are shown]"


def test_create_writes_new_files_only(tools: Tools) -> None:
    assert tools.edit("create", path="new/ü.py", file_text="x = 1\n") == "new/ü.py was created."
    assert tools.read("new/ü.py") == "x = 1\n"
    tools.refuse("exists; edit it", "create", path="new/ü.py", file_text="")
    tools.refuse("is a directory", "create", path="new", file_text="")


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
    tools.write("a\nb\na\n")
    tools.refuse(r"occurs 2 times in a.py: in the lines 1, 3", "str_replace", old_str="a", new_str="b")
    tools.refuse(r"occurs 0 times in a.py; .* with its indentation", "str_replace", old_str="c", new_str="b")
    tools.refuse("old_str is empty", "str_replace", old_str="", new_str="b")
    tools.refuse(r"none.py does not exist", "str_replace", path="none.py", old_str="a", new_str="b")
    assert tools.read() == "a\nb\na\n"


@pytest.mark.parametrize(
    ("before", "line", "after"),
    [("a\nb\n", 0, "new\na\nb\n"), ("a\nb\n", 2, "a\nb\nnew\n"), ("a\nb", 2, "a\nb\nnew"), ("", 0, "new\n")],
)
def test_insert_adds_lines_after_a_line(tools: Tools, before: str, line: int, after: str) -> None:
    tools.write(before)
    for wrong in (-1, before.count("\n") + 2):
        tools.refuse("must be between 0 and", "insert", insert_line=wrong, new_str="new")
    tools.edit("insert", insert_line=str(line), new_str="new")
    assert tools.read() == after


def test_undo_takes_back_one_change_at_a_time(tools: Tools) -> None:
    tools.write("a\n")
    tools.edit("str_replace", old_str="a", new_str="b")
    tools.edit("insert", insert_line=1, new_str="c")
    assert tools.edit("undo_edit") == "The last change of a.py was taken back."
    assert tools.read() == "b\n"
    tools.edit("undo_edit")
    assert tools.read() == "a\n"
    tools.refuse(r"no change of a.py to take back", "undo_edit")


@pytest.mark.parametrize(
    ("command", "missing"), [("create", "file_text"), ("str_replace", "old_str"), ("insert", "insert_line")]
)
def test_missing_parameters_are_named(tools: Tools, command: str, missing: str) -> None:
    tools.refuse(f"{command} needs the parameter {missing}", command)


def test_edits_keep_the_mode_line_ends_and_bytes_that_are_not_utf_8(tools: Tools) -> None:
    file = tools.folder / "a.py"
    tools.write(b"a\r\nb\r\n\xff\r\n")
    file.chmod(0o755)
    tools.edit("str_replace", old_str="a\nb", new_str="c\nd")
    assert file.read_bytes() == b"c\r\nd\r\n\xff\r\n"
    assert file.stat().st_mode & 0o777 == 0o755
    assert tools.edit("view").endswith("     3\t\ufffd\n     4\t")
    tools.write(b"a\r\nb\n")
    tools.edit("str_replace", old_str="b", new_str="c")
    assert file.read_bytes() == b"a\r\nc\n"


def test_binary_files_special_files_and_odd_paths_are_explained(tools: Tools) -> None:
    tools.write(b"\x7fELF\0")
    tools.refuse("is a binary file", "view")
    tools.refuse("is not a regular file", "view", path="/dev/zero")
    tools.refuse("is not a path", "view", path="")
    tools.refuse("does not exist", "view", path="$(touch pwned)")
    tools.refuse("cannot be written", "create", path="a.py/b.py", file_text="")
    assert not (tools.folder / "pwned").exists()


def test_think_and_submit(tools: Tools) -> None:
    assert tools.call("think", thought="hm") == "Your thought has been logged."
    assert tools.call("submit", message=" done ") == "done"
    assert tools.call("submit") == ""
