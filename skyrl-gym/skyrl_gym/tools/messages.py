"""Prompts and messages about tools, in the format that Qwen and Hermes models were trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_gym.envs.base_text_env import ConversationType, MessageType

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


def format_tool_response(text: str) -> str:
    """Format a tool's result as chat templates write it into a user message."""
    return f"<tool_response>\n{text}\n</tool_response>"


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
        return [append_text(prompt[0], text), *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]


def append_text(message: MessageType, text: str) -> MessageType:
    """Append `text` to a message's content. The content may be empty or a list of parts."""
    content = message["content"]
    if isinstance(content, list | tuple):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}\n\n{text}" if content else text}
