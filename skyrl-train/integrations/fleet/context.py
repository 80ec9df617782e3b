"""Tools that let the model look at its own context: search earlier messages and results, and drop old turns."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.tools.calls import ToolCall

MAX_HISTORY_HITS = 10
MAX_OUTPUT_HITS = 20
HIT_CHARS = 200
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
            "page_size": {"type": "integer", "description": f"lines of a page, 50 by default, at most {MAX_PAGE_SIZE}"},
        },
        [],
    ),
]
"""The tools, in the format of the OpenAI API."""

CONTEXT_TOOL_NAMES = frozenset(tool["function"]["name"] for tool in CONTEXT_TOOLS)


class ContextToolError(ValueError):
    """A call of a context tool with invalid arguments; the message is for the model."""


@dataclass(slots=True)
class Context:
    """The conversation of an episode, and the full results of its tools.

    prompt: the system message and the task, which are never dropped.
    """

    prompt: ConversationType
    max_output_chars: int
    turns: list[ConversationType] = field(default_factory=list)  # reply and observations, those in the conversation
    dropped: list[ConversationType] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @property
    def messages(self) -> ConversationType:
        """The conversation as the model sees it."""
        return [*self.prompt, *(message for turn in self.turns for message in turn)]

    def add_output(self, text: str) -> str:
        """Keep a tool result, and return it, truncated to `max_output_chars` with a notice."""
        self.outputs.append(text)
        return self.truncate(text)

    def truncate(self, text: str) -> str:
        """Return a text, truncated to `max_output_chars` with a notice."""
        limit = self.max_output_chars
        if len(text) <= limit:
            return text
        return f"{text[:limit]}\n[Truncated: {limit} of {len(text)} characters of tool result {len(self.outputs)}]"

    def call(self, call: ToolCall) -> str:
        """Execute a call of a context tool and return its result.

        Raises:
            ContextToolError: the arguments are invalid.
        """
        arguments = call.arguments
        tool = next(tool["function"] for tool in CONTEXT_TOOLS if tool["function"]["name"] == call.name)
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
        lines = self.outputs[output - 1].splitlines()
        if call.name == "search_tool_output":
            pattern = _read_text(arguments, "pattern").lower()
            hits = [(i, line) for i, line in enumerate(lines, start=1) if pattern in line.lower()]
            return _format_hits([f"line {i}: {_excerpt(line, pattern)}" for i, line in hits], MAX_OUTPUT_HITS)
        page, size = _read_count(arguments, "page", 1, 1), _read_count(arguments, "page_size", 50, 1)
        size = min(size, MAX_PAGE_SIZE)
        n_pages = max(1, -(-len(lines) // size))
        if page > n_pages:
            raise ContextToolError(f"page={page} does not exist; there are {n_pages} pages of {size} lines")
        shown = "\n".join(lines[(page - 1) * size : page * size])
        return self.truncate(f"Page {page} of {n_pages}, tool result {output}:\n{shown}")

    def _summarize(self) -> str:
        facts = {
            "turns": len(self.turns),
            "dropped_turns": len(self.dropped),
            "characters": sum(len(str(message["content"])) for message in self.messages),
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
        texts = [(message["role"], str(message["content"])) for message in messages]
        hits = [f"{role}: {_excerpt(text, pattern)}" for role, text in texts if pattern in text.lower()]
        return _format_hits(hits, MAX_HISTORY_HITS)


def _excerpt(text: str, pattern: str) -> str:
    """Return the part of a text around the pattern, which is in lower case."""
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
    if isinstance(value, str) and value.strip().isdigit():  # plain-text calls
        value = int(value[:9])
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ContextToolError(f"{name}={value!r} must be a whole number of at least {minimum}")
    return value
