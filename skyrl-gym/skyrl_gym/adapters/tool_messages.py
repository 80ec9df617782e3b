"""What a model reads of tools: which there are, and what they answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.adapters.actions import ActionError
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_tool_calls

FORMAT = """# Tools

You can call these functions. Each line describes one of them as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function-name", "arguments": {{"argument-name": "value"}}}}
</tool_call>"""


def tools_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """What the system prompt says of tools, given as OpenAI's interface describes them."""
    return FORMAT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def with_system(prompt: ConversationType, text: str) -> ConversationType:
    """The prompt with `text` at the end of its system message, or in one of its own."""
    if not text:
        return list(prompt)
    if prompt and prompt[0]["role"] == "system":
        return [{**prompt[0], "content": f"{prompt[0]['content']}\n\n{text}"}, *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]


def calls_in(reply: str) -> list[ToolCall]:
    """The calls in a reply, in order; there may be none.

    Raises:
        ActionError: one cannot be read, or there are too many.
    """
    try:
        return parse_tool_calls(reply)
    except ToolCallError as error:
        raise ActionError(str(error)) from error


def tool_response(text: str) -> str:
    """What a tool answered, as chat templates write it into a message of the user."""
    return f"<tool_response>\n{text}\n</tool_response>"
