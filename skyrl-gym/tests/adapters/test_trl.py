import asyncio
import functools
import json
from typing import Any, Literal

import numpy as np
import pytest
from gym_kit.messages import call, message_text, user
from gym_kit.processes import no_leaks

import skyrl_gym
from skyrl_gym.adapters.trl import TrlEnv

PROMPT = user("Guess.")


class Guess:
    """Guess a number between 1 and 10."""

    def __init__(self, penalty: float = 0.1) -> None:
        self.penalty = penalty
        self.closed = 0

    def reset(self, **row: Any) -> str | None:
        self.row = row
        self.number = row["number"]
        self.reward = 0.0
        self.done = False
        return row.get("greeting")

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: between 1 and 10
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = number == self.number
        self.reward = 1.0 if self.done else self.reward - self.penalty
        return "Right." if self.done else "Higher." if number < self.number else "Lower."

    def hint(self, kind: Literal["parity", "size"] = "parity") -> dict[str, Any]:
        """Ask for a hint."""
        return {"even": self.number % 2 == 0, "kind": kind}

    def fail(self, how: str) -> str:
        """Fail."""
        raise {"value": ValueError, "connection": ConnectionResetError, "timeout": TimeoutError}[how](f"failed: {how}")

    def close(self) -> None:
        self.closed += 1

    def _secret(self) -> str:
        return str(self.number)

    @property
    def answer(self) -> int:
        return self.number


class Asynchronous:
    """Has async methods, which must run in one event loop."""

    async def reset(self, number: int, **row: Any) -> None:
        self.loop = asyncio.get_running_loop()

    async def ask(self, question: str) -> str:
        """Ask."""
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        return question.upper()

    async def get_reward(self) -> float | None:
        return None


class Narrow:
    """Takes one column of the row, and returns its reward from a method."""

    def reset(self, number: int) -> None:
        self.number = number

    def nothing(self) -> None:
        """Do nothing."""

    def get_reward(self) -> float:
        return self.number / 2


def retried(method: Any) -> Any:
    """Wrap an async method so that it is no longer a coroutine function, as decorators do."""
    return functools.wraps(method)(lambda *args, **kwargs: method(*args, **kwargs))


class Wrapped(Narrow):
    @retried
    async def ask(self, question: str) -> set[str]:
        """Ask."""
        await asyncio.sleep(0)
        return {question.upper()}


class Numpy(Narrow):
    def move(self, to: int) -> str:
        """Move."""
        self.done = np.array([to])[0] == self.number
        return "moved"


class Toolless:
    """Has no tools, and a resource to close."""

    n_open = 0

    def __init__(self) -> None:
        type(self).n_open += 1

    def reset(self, **row: Any) -> None: ...

    def close(self) -> None:
        type(self).n_open -= 1


class Odd(Narrow):
    def get_reward(self) -> Any:
        return "much"


class Talkative(Narrow):
    def reset(self, number: int) -> Any:
        return ["a list"]


def make_env(name: str, extras: dict[str, Any] | None = None, **env_config: Any) -> TrlEnv:
    return TrlEnv({"factory": f"{__name__}:{name}", **env_config}, {"number": 7, **(extras or {})})


def start_env(name: str, extras: dict[str, Any] | None = None, **env_config: Any) -> TrlEnv:
    env = make_env(name, extras, **env_config)
    env.init(PROMPT)
    return env


def test_an_episode() -> None:
    skyrl_gym.register(id="trl", entry_point="skyrl_gym.adapters.trl:TrlEnv")
    row = {"number": 7, "greeting": "Between 1 and 10.", "data_source": "x", "max_turns": 5, "reads_images": True}
    with skyrl_gym.make("trl", env_config={"factory": f"{__name__}:Guess"}, extras=row) as env:
        prompt, _ = env.init(PROMPT)
        assert prompt[-1] == {"role": "user", "content": "Guess.\n\nBetween 1 and 10."}
        assert env._env.row == {"prompt": PROMPT, "number": 7, "greeting": "Between 1 and 10.", "data_source": "x"}
        output = env.step(f"<think>5?</think>{call('guess', number=5)}")
        assert message_text(output) == "<tool_response>\nHigher.\n</tool_response>"
        assert (output["reward"], output["done"]) == (0.0, False)
        output = env.step(call("guess", number=7))
        assert (output["reward"], output["done"], output["observations"]) == (1.0, True, [])
        assert env.get_metrics() == {"steps": 2, "tool_calls": 2, "failed_tool_calls": 0, "invalid_actions": 0}
        with pytest.raises(RuntimeError, match="over"):
            env.step("hello")


def test_the_system_prompt_lists_public_methods() -> None:
    env = make_env("Guess")
    system = env.init([{"role": "system", "content": "Be brief."}, *PROMPT])[0][0]["content"]
    assert system.startswith("Be brief.\n\n# Tools")
    fail, guess, hint = (json.loads(line)["function"] for line in system.splitlines() if line.startswith('{"type"'))
    assert [tool["name"] for tool in (fail, guess, hint)] == ["fail", "guess", "hint"]
    assert guess["description"] == "Guess the number."
    assert guess["parameters"]["properties"]["number"]["type"] == "integer"
    assert guess["parameters"]["properties"]["number"]["description"] == "between 1 and 10"
    assert guess["parameters"]["required"] == ["number"]
    assert make_env("Guess", describe_tools=False).init(PROMPT)[0] == PROMPT


def test_rewards_of_the_last_turn() -> None:
    env = start_env("Guess")
    env.step(call("guess", number=1))
    output = env.step(f"<think>{call('guess', number=7)}</think>I give up.")  # a call in thoughts is none
    assert (output["reward"], output["done"]) == (-0.1, True)
    assert env.get_metrics()["tool_calls"] == 1
    env = start_env("Guess", {"max_turns": 2}, kwargs={"penalty": 0.25})
    assert env.step(call("guess", number=1))["reward"] == 0.0
    output = env.step(call("guess", number=2))
    assert (output["reward"], output["done"], output["observations"]) == (-0.5, True, [])
    env = start_env("Numpy")  # `done` may be a bool of NumPy
    assert [env.step(call("move", to=to))["done"] for to in (3, 7)] == [False, True]


def test_calls_of_a_reply_are_executed_in_order() -> None:
    seen = message_text(start_env("Guess").step(call("guess", number=1) + " and " + call("hint", kind="size")))
    first, second = "<tool_response>\nHigher.\n</tool_response>", "even: false\nkind: size"
    assert seen == f"{first}\n<tool_response>\n{second}\n</tool_response>"


def test_mistakes_are_explained() -> None:
    env = start_env("Guess")
    mistakes = {
        call("fly"): "there is no tool fly; the tools are fail, guess, hint.",
        call("_secret"): "there is no tool _secret",
        call("reset", number=3): "there is no tool reset",
        call("close"): "there is no tool close",
        call("answer"): "there is no tool answer",
        call("guess", number="seven"): "arguments of guess are wrong",
        call("guess"): "arguments of guess are wrong",
        call("guess", number=3, self="me"): "arguments of guess are wrong",
        "<tool_call>{oops</tool_call>": "not valid JSON",
        call("guess", number=1) * 33: "more than 32 tool calls",
    }
    for reply, message in mistakes.items():
        assert message in message_text(env.step(reply))
    assert env._env.reward == 0.0
    assert env.get_metrics() == {"steps": 10, "tool_calls": 0, "failed_tool_calls": 0, "invalid_actions": 10}


def test_tool_error_is_the_observation_unless_it_is_a_connection_error() -> None:
    env = start_env("Guess")
    error = message_text(env.step(call("fail", how="value")))
    assert error == "<tool_response>\nError: failed: value\n</tool_response>"
    assert env.get_metrics()["failed_tool_calls"] == 1
    for how, kind in (("connection", ConnectionResetError), ("timeout", TimeoutError)):
        with pytest.raises(kind, match="failed"):
            start_env("Guess").step(call("fail", how=how))


def test_async_methods_share_a_loop() -> None:
    with no_leaks(), start_env("Asynchronous", {"data_source": "x"}) as env:
        assert "HELLO" in message_text(env.step(call("ask", question="hello")))
        assert env.step("bye")["reward"] is None
    env.close()
    with start_env("Asynchronous", missing_reward=0.0) as env:
        assert env.step("bye")["reward"] == 0.0
    with start_env("Wrapped") as env:
        message = message_text(env.step(call("ask", question="hello")))
        assert message == "<tool_response>\n{'HELLO'}\n</tool_response>"
        assert env.get_metrics()["failed_tool_calls"] == 0


def test_close_closes_once() -> None:
    env = make_env("Guess")
    env.close()
    env.close()
    assert env._env.closed == 1
    with pytest.raises(RuntimeError, match="over"):
        env.step(call("guess", number=7))


@pytest.mark.parametrize(
    ("name", "message"),
    [("Odd", "reward of .*:Odd is 'much'"), ("Talkative", r"reset of .*Talkative returned \['a list'\]")],
)
def test_return_values_are_validated(name: str, message: str) -> None:
    def play() -> None:
        start_env(name).step("bye")

    with pytest.raises(ValueError, match=message):
        play()


@pytest.mark.parametrize(
    ("env_config", "message"),
    [
        ({}, r"trl\.factory is missing"),
        ({"factory": "json"}, "must be 'module:attribute'"),
        ({"factory": f"{__name__}:Gues"}, "Did you mean 'Guess'"),
        ({"factory": f"{__name__}:Toolless"}, "Toolless has no tools; add public methods besides reset"),
    ],
)
def test_invalid_config_raises(env_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrlEnv(env_config, {})
    assert Toolless.n_open == 0
