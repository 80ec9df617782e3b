"""An agent that plays Catch with OpenAI's client and knows nothing about training.

The loop is the same as in any agent: ask the model, execute its reply, report the outcome.
"""

from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from examples.catch.env import CatchEnv
from skyrl_agent.agent_generator import AgentResult
from skyrl_train.types import PromptRow


async def play_catch(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> AgentResult:
    """Play a dataset row's game, with a reward for every turn."""
    http = DefaultAsyncHttpxClient(verify=False)  # plain HTTP needs no certificates, and loading them takes 30 ms
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        game = CatchEnv(env_config={}, extras=row.env_extras)
        messages: list[Any] = list(row.prompt)
        rewards: list[float] = []
        is_over = False
        while not is_over:
            completion = await client.chat.completions.create(model=model, messages=messages)
            reply = completion.choices[0].message.content or ""
            turn = game.step(reply)
            rewards.append(turn["reward"] or 0.0)  # Catch rewards every turn
            messages += [{"role": "assistant", "content": reply}, *turn["observations"]]
            is_over = turn["done"]
        return AgentResult(rewards, metrics=game.get_metrics())
