"""Tool traces for the warm start: problems of the training set, solved in the environment."""

from collections.abc import Iterator, Sequence
from typing import Any

from examples.calculator.env import CalculatorEnv

CALL = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def traces(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the conversation of each row: a call, its result, and the answer."""
    for row in rows:
        env = CalculatorEnv(None, row)
        prompt, _ = env.init(row["prompt"])
        call = CALL.format(expression=row["extra_info"]["expression"])
        step = env.step(call)
        answer = f"The answer is {row['reward_spec']['ground_truth']}."
        assert env.step(answer)["reward"] == 1.0
        replies = [{"role": "assistant", "content": text} for text in (call, answer)]
        yield {"messages": [*prompt, replies[0], *step["observations"], replies[1]]}
