import json
import re
from typing import Any

import pytest

from integrations.fleet.context import Context, ContextToolError
from skyrl_gym.tools.calls import ToolCall

ROWS = json.dumps([{"id": i, "name": f"user{i}"} for i in range(400)])
"""A result on one line, as most tools return JSON."""


def call(context: Context, name: str, **arguments: Any) -> str:
    return context.call(ToolCall(name, arguments))


def read_pages(context: Context, **arguments: Any) -> list[str]:
    """Return the text of all pages of the newest tool result."""
    n_pages = int(re.findall(r"Page 1 of (\d+),", call(context, "view_tool_output", **arguments))[0])
    pages = [call(context, "view_tool_output", page=page, **arguments) for page in range(1, n_pages + 1)]
    with pytest.raises(ContextToolError, match=f"page={n_pages + 1} does not exist; there are {n_pages} pages"):
        call(context, "view_tool_output", page=n_pages + 1, **arguments)
    return [page.partition("\n")[2] for page in pages]


@pytest.mark.parametrize(
    "text", [ROWS, "\n".join(f"line {i}" for i in range(120)), "a\n\n  b\r\n" + "x" * 401 + "\n", ""]
)
@pytest.mark.parametrize("max_output_chars", [50, 1000, 10_000])
@pytest.mark.parametrize("page_size", [1, 50, 500])
def test_the_pages_contain_the_whole_result(text: str, max_output_chars: int, page_size: int) -> None:
    context = Context([], max_output_chars)
    context.add_output(text)
    pages = read_pages(context, page_size=page_size)
    assert "".join(pages) == text
    assert all(len(page) <= max_output_chars + 1 for page in pages)  # with the newline at the end of a line


def test_pages_of_short_lines_and_notices_of_truncation() -> None:
    context = Context([], 1000)
    context.add_output("\n".join(f"line {i}" for i in range(1, 8)))
    shown = call(context, "view_tool_output", page=2, page_size=3)
    assert shown == "Page 2 of 3, lines 4 to 6, tool result 1:\nline 4\nline 5\nline 6\n"
    context = Context([], 100)
    for number in (1, 2):
        assert context.add_output(ROWS).endswith(
            f"\n[Truncated: 100 of {len(ROWS)} characters of tool result {number}]"
        )
    assert "Truncated" not in call(context, "view_tool_output", output=1)
    assert context.truncate("x" * 101).endswith("x\n[Truncated: 100 of 101 characters]")


def test_a_search_shows_all_matches() -> None:
    context = Context([], 1000)
    context.add_output(ROWS)
    found = call(context, "search_tool_output", pattern="USER39")
    assert set(re.findall(r"user39\d?", found)) == {"user39", *(f"user{i}" for i in range(390, 400))}
    number = int(re.findall(r"line (\d+): ", found)[-1])
    assert "user399" in call(context, "view_tool_output", page=number, page_size=1)
    context = Context([], 1000)
    context.add_output("x" * 198 + "needle" + "y" * 300)
    assert call(context, "search_tool_output", pattern="needle") == f"line 1: {'x' * 198}needle"
    assert call(context, "search_tool_output", pattern="needles") == "Nothing found."
