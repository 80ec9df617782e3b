"""Prompts and messages about tools, in the format that Qwen and Hermes models were trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_gym.envs.base_text_env import ConversationType, MessageType

MAX_RESULT_CHARS = 50_000  # of a tool's result that the model reads

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
    """Format a prompt that describes tools, given in the format of the OpenAI API, and how to call them."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def format_tool_response(text: str) -> str:
    """Format a tool's result as chat templates write it into a user message."""
    return f"<tool_response>\n{text}\n</tool_response>"


def shorten_result(text: str) -> str:
    """Return a tool's result with at most `MAX_RESULT_CHARS` characters: the first and the last half are kept."""
    if len(text) <= MAX_RESULT_CHARS:
        return text
    n_kept = MAX_RESULT_CHARS // 2
    return f"{text[:n_kept]}\n[{len(text) - 2 * n_kept:,} characters are left out]\n{text[-n_kept:]}"


def append_to_system(prompt: ConversationType, text: str) -> ConversationType:
    """Return the prompt with `text` at the end of its system message, which is added if there is none."""
    if not text:
        return list(prompt)
    if prompt and prompt[0]["role"] == "system":
        return [append_text(prompt[0], text), *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]


def append_text(message: MessageType, text: str) -> MessageType:
    """Return the message with `text` after its content, which may be empty or a list of parts."""
    content = message["content"]
    if isinstance(content, list | tuple):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}\n\n{text}" if content else text}
