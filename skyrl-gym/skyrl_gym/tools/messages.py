"""What a model reads of tools, in the format that Qwen and Hermes models were trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_gym.envs.base_text_env import ConversationType, MessageType

INSTRUCTIONS = """# Tools

You can call these functions, each described in JSON on a line of its own:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between tags. You may call several in one reply:
<tool_call>
{{"name": "<function-name>", "arguments": {{"<argument-name>": "<value>"}}}}
</tool_call>"""


def tools_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """Which tools there are and how to call them. They are given as OpenAI's interface describes functions."""
    return readable(INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)))


def tool_response(text: str) -> str:
    """What a tool answered, as chat templates write it into a message of the user."""
    return f"<tool_response>\n{readable(text)}\n</tool_response>"


def with_system(prompt: ConversationType, text: str) -> ConversationType:
    """The prompt with `text` at the end of its system message, or in one of its own."""
    if not text:
        return list(prompt)
    if prompt and prompt[0]["role"] == "system":
        return [extended(prompt[0], text), *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]


def extended(message: MessageType, text: str) -> MessageType:
    """The message with `text` after what it says, which may be nothing, or a list of parts."""
    content = message["content"]
    if isinstance(content, list | tuple):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}\n\n{text}" if content else text}


def readable(text: str) -> str:
    """The text without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
