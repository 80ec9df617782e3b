"""Tools with which the model manages its own context: search earlier messages and results, and drop old turns."""

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.images import join_texts
from skyrl_gym.tools.arguments import convert_arguments
from skyrl_gym.tools.calls import ToolCall

MAX_HISTORY_HITS = 10
MAX_OUTPUT_HITS = 20
HIT_CHARS = 200
LINE_CHARS = 200
"""Maximum length of a line of a tool result. A longer line counts as several."""
MAX_PAGE_SIZE = 500

_PATTERN = {"type": "string", "description": "text to search for; upper and lower case are the same"}
_OUTPUT = {"type": "integer", "description": "number of the tool result; by default the newest"}


def _describe_tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CONTEXT_TOOLS = [
    _describe_tool("check_context", "Show how many turns and characters your conversation has.", {}, []),
    _describe_tool(
        "manage_context",
        "Drop old turns. The instructions, the task and the most recent turns remain.",
        {"keep_recent_turns": {"type": "integer", "description": "number of turns to keep, 5 by default"}},
        [],
    ),
    _describe_tool(
        "search_history", "Search all messages so far, also dropped ones.", {"pattern": _PATTERN}, ["pattern"]
    ),
    _describe_tool(
        "search_tool_output",
        "Search the lines of a tool result, also of one that was truncated.",
        {"pattern": _PATTERN, "output": _OUTPUT},
        ["pattern"],
    ),
    _describe_tool(
        "view_tool_output",
        "Show a page of a tool result, also of one that was truncated.",
        {
            "output": _OUTPUT,
            "page": {"type": "integer", "description": "1 is the first page, and the default"},
            "page_size": {
                "type": "integer",
                "description": f"maximum lines of a page, 50 by default, at most {MAX_PAGE_SIZE}; "
                f"a line has at most {LINE_CHARS} characters",
            },
        },
        [],
    ),
]
"""The tools, in the OpenAI API's format."""

CONTEXT_TOOL_NAMES = frozenset(tool["function"]["name"] for tool in CONTEXT_TOOLS)


class ContextToolError(ValueError):
    """A call of a context tool has invalid arguments. The message is for the model."""


@dataclass(slots=True)
class Context:
    """An episode's conversation, and the full results of its tools.

    prompt: the system message and the task. They are never dropped.
    """

    prompt: ConversationType
    max_output_chars: int
    turns: list[ConversationType] = field(
        default_factory=list
    )  # replies and observations that are still in the conversation
    dropped: list[ConversationType] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @property
    def messages(self) -> ConversationType:
        """The conversation as the model sees it."""
        return [*self.prompt, *(message for turn in self.turns for message in turn)]

    def add_output(self, text: str) -> str:
        """Store a tool result. Return it truncated to `max_output_chars`, with a notice."""
        self.outputs.append(text)
        return self.truncate(text, f" of tool result {len(self.outputs)}")

    def truncate(self, text: str, source: str = "") -> str:
        """Truncate a text to `max_output_chars`, with a notice that names its source."""
        limit = self.max_output_chars
        if len(text) <= limit:
            return text
        return f"{text[:limit]}\n[Truncated: {limit} of {len(text)} characters{source}]"

    def call(self, call: ToolCall) -> str:
        """Execute a context tool call and return its result.

        Raises:
            ContextToolError: the arguments are invalid.
        """
        tool = next(tool["function"] for tool in CONTEXT_TOOLS if tool["function"]["name"] == call.name)
        arguments = convert_arguments(call.arguments, tool["parameters"])
        if unknown := sorted(arguments.keys() - tool["parameters"]["properties"].keys()):
            raise ContextToolError(f"{call.name} has no argument {unknown[0]}")
        if call.name == "check_context":
            return self._summarize()
        if call.name == "manage_context":
            return self._drop_turns(_read_count(arguments, "keep_recent_turns", 5, 1))
        if call.name == "search_history":
            return self._search_history(_read_text(arguments, "pattern"))
        output = _read_count(arguments, "output", len(self.outputs), 1)
        if output > len(self.outputs):
            raise ContextToolError(f"output={output} does not exist; there are {len(self.outputs)} tool results")
        if call.name == "search_tool_output":
            return self._search_output(output, _read_text(arguments, "pattern"))
        page, size = _read_count(arguments, "page", 1, 1), _read_count(arguments, "page_size", 50, 1)
        return self._view_output(output, page, min(size, MAX_PAGE_SIZE))

    def _summarize(self) -> str:
        facts = {
            "turns": len(self.turns),
            "dropped_turns": len(self.dropped),
            "characters": sum(len(join_texts(message["content"])) for message in self.messages),
            "tool_results": len(self.outputs),
        }
        return json.dumps(facts)

    def _drop_turns(self, n_kept: int) -> str:
        n_dropped = max(0, len(self.turns) - n_kept)
        self.dropped += self.turns[:n_dropped]
        self.turns = self.turns[n_dropped:]
        return f"Dropped {n_dropped} turns; {len(self.turns)} remain."

    def _search_history(self, pattern: str) -> str:
        pattern = pattern.lower()
        messages = [*self.prompt, *(message for turn in [*self.dropped, *self.turns] for message in turn)]
        texts = [(message["role"], join_texts(message["content"])) for message in messages]
        hits = [f"{role}: {_excerpt(text, pattern)}" for role, text in texts if pattern in text.lower()]
        return _format_hits(hits, MAX_HISTORY_HITS)

    def _search_output(self, output: int, pattern: str) -> str:
        """Return the lines of a tool result in which a match of the pattern starts."""
        text, lines = self.outputs[output - 1], self._split_lines(output)
        starts = [line.start() for line in lines]
        ends: dict[int, int] = {}  # end of the last match in a line, by line index
        for match in re.finditer(re.escape(pattern), text, re.IGNORECASE):
            ends[bisect_right(starts, match.start()) - 1] = match.end()
        hits = [(i, text[starts[i] : max(lines[i].end(), end)].removesuffix("\n")) for i, end in ends.items()]
        return _format_hits([f"line {i + 1}: {hit}" for i, hit in hits], MAX_OUTPUT_HITS)

    def _view_output(self, output: int, page: int, page_size: int) -> str:
        """Return a page of a tool result, of at most `max_output_chars` without its heading."""
        pages = _split_pages([line.group() for line in self._split_lines(output)], page_size, self.max_output_chars)
        if page > len(pages):
            raise ContextToolError(f"page={page} does not exist; there are {len(pages)} pages")
        n_before = sum(map(len, pages[: page - 1]))
        lines = f"lines {n_before + 1} to {n_before + len(pages[page - 1])}"
        return f"Page {page} of {len(pages)}, {lines}, tool result {output}:\n{''.join(pages[page - 1])}"

    def _split_lines(self, output: int) -> list[re.Match[str]]:
        """Return the lines of a tool result, as matches at their offsets."""
        length = min(LINE_CHARS, self.max_output_chars)
        return list(re.finditer(rf".{{1,{length}}}\n?|\n", self.outputs[output - 1]))


def _split_pages(lines: Sequence[str], max_lines: int, max_chars: int) -> list[list[str]]:
    """Group lines into pages of at most `max_lines` lines and `max_chars` characters."""
    pages: list[list[str]] = [[]]
    n_chars = 0
    for line in lines:
        if pages[-1] and (len(pages[-1]) == max_lines or n_chars + len(line) > max_chars):
            pages.append([])
            n_chars = 0
        pages[-1].append(line)
        n_chars += len(line)
    return pages


def _excerpt(text: str, pattern: str) -> str:
    """Return the part of a text around the pattern. The pattern is in lower case."""
    start = max(0, text.lower().find(pattern) - HIT_CHARS // 4)
    return text[start : start + HIT_CHARS]


def _format_hits(hits: list[str], limit: int) -> str:
    more = f"\n[{len(hits) - limit} more]" if len(hits) > limit else ""
    return "\n".join(hits[:limit]) + more if hits else "Nothing found."


def _read_text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value:
        raise ContextToolError(f"{name}={value!r} must be text")
    return value


def _read_count(arguments: dict[str, Any], name: str, default: int, minimum: int) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ContextToolError(f"{name}={value!r} must be a whole number of at least {minimum}")
    return value
