"""Prompts and messages about tools, in the format that Qwen and Hermes models were trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, overload

MessageType = dict[str, Any]
"""A chat message: ``role``, ``content``, and any other key the chat template understands (``tool_calls``, …).

The content is text, or a list of parts if it has images (`skyrl_gym.images`).
"""

ConversationType = list[MessageType]

Content = str | list[dict[str, Any]]
"""Content of a message: text, or a list of parts with images (`skyrl_gym.images`)."""

MAX_RESULT_CHARS = 50_000  # maximum length of a tool's result as the model reads it

INSTRUCTIONS = """# Tools

You can call these functions, each described in JSON on a line of its own:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between tags. You may call several in one reply:
<tool_call>
{{"name": "<function-name>", "arguments": {{"<argument-name>": "<value>"}}}}
</tool_call>"""


def format_tools_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """Format the prompt that describes tools and how to call them. `tools` is in the OpenAI API's format."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


@overload
def format_tool_response(result: str) -> str: ...
@overload
def format_tool_response(result: Content) -> Content: ...
def format_tool_response(result: Content) -> Content:
    """Format a tool's result as chat templates write it into a user message."""
    return join_contents(["<tool_response>", result, "</tool_response>"])


def join_contents(contents: Sequence[Content]) -> Content:
    """Join contents with line ends.

    >>> join_contents(["one", "two"])
    'one\\ntwo'
    """
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n".join(texts)
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": "\n"}] if parts else []
        parts += _to_parts(content)
    return parts


def _to_parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else [*content]


def shorten_result(text: str) -> str:
    """Cut the middle out of a tool's result so that at most `MAX_RESULT_CHARS` characters remain."""
    if len(text) <= MAX_RESULT_CHARS:
        return text
    n_kept = MAX_RESULT_CHARS // 2
    return f"{text[:n_kept]}\n[{len(text) - 2 * n_kept:,} characters are left out]\n{text[-n_kept:]}"


def append_to_system(prompt: ConversationType, text: str) -> ConversationType:
    """Append `text` to the prompt's system message. Add one if there is none.

    >>> append_to_system([{"role": "user", "content": "Hi"}], "Be brief.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    if not text:
        return list(prompt)
    if prompt and prompt[0]["role"] == "system":
        return [append_content(prompt[0], text), *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]


def append_content(message: MessageType, added: Content) -> MessageType:
    """Append text or parts to a message's content. The content may be empty."""
    content = message["content"] or ""
    if isinstance(content, str) and isinstance(added, str):
        return {**message, "content": f"{content}\n\n{added}" if content else added}
    return {**message, "content": [*(_to_parts(content) if content else []), *_to_parts(added)]}
