"""An environment with tools that are plain functions, one of which has a hidden argument."""

import verifiers as vf
from datasets import Dataset


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fail(text: str) -> str:
    """Raise an error."""
    raise ValueError(f"no {text}")


def lose(text: str) -> str:
    """Lose the connection."""
    raise ConnectionError("gone")


async def remember(text: str, notes: list) -> str:
    """Remember a text."""
    notes.append(text)
    return f"{len(notes)} notes"


class CalculatorEnv(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(tools=[add, fail, lose], **kwargs)
        self.add_tool(remember, args_to_skip=["notes"])

    async def setup_state(self, state: vf.State) -> vf.State:
        state["notes"] = []
        return state

    def update_tool_args(
        self, tool_name: str, tool_args: dict, messages: vf.Messages, state: vf.State, **kwargs
    ) -> dict:
        return {**tool_args, "notes": state["notes"]} if tool_name == "remember" else tool_args


def answered(completion: vf.Messages, answer: str) -> float:
    return float(f"ANSWER: {answer}" in (completion[-1]["content"] or ""))


def load_environment(stops: bool = False) -> vf.Environment:
    dataset = Dataset.from_list([{"question": "What is 2 + 3?", "answer": "5"}])
    errors = [ValueError, ConnectionError] if stops else []
    return CalculatorEnv(dataset=dataset, rubric=vf.Rubric([answered]), max_turns=6, stop_errors=errors)
