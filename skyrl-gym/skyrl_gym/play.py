"""Take the place of the model in a terminal."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from skyrl_gym.contract import checked_output, checked_prompt
from skyrl_gym.envs.registration import EnvSpec, make
from skyrl_gym.worker import EnvConfig

END_OF_REPLY = "."


def play(
    spec: EnvSpec, row: Mapping[str, Any], env_config: Mapping[str, Any], replies: TextIO, screen: TextIO
) -> float | None:
    """Play an episode with what `replies` says, up to a line with a full stop for each turn.

    Returns the sum of the rewards; None where one cannot be told, or the replies end first.
    """
    prompt = row.get("prompt") or [{"role": "user", "content": "Begin."}]
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
    env = make(spec, env_config=EnvConfig(env_config), extras={"max_turns": 10} | copy.deepcopy(extras))
    with asyncio.Runner() as runner:

        def call(method: str, *args: Any) -> Any:
            native = getattr(env, f"{method}_async", None)
            return runner.run(native(*args)) if inspect.iscoroutinefunction(native) else getattr(env, method)(*args)

        try:
            _show(checked_prompt(call("init", copy.deepcopy(prompt))), screen)
            rewards: list[Any] = []
            while (reply := _reply(replies, screen)) is not None:
                output = checked_output(call("step", reply))
                rewards.append(output["reward"])
                _show(output["observations"] or [], screen)
                screen.write(f"-- reward {output['reward']}\n")
                if output["done"]:
                    each = [sum(reward) if isinstance(reward, list) else reward for reward in rewards]
                    total = None if None in each else float(sum(each))
                    screen.write(f"\nThe episode is over: {total} in {len(rewards)} turns. {call('get_metrics')}\n")
                    return total
            return None
        finally:
            call("close")


def _show(messages: Sequence[Mapping[str, Any]], screen: TextIO) -> None:
    for message in messages:
        screen.write(f"\n[{message['role']}]\n{message['content']}\n")


def _reply(replies: TextIO, screen: TextIO) -> str | None:
    """The lines of one reply, the last of which may lack its end; None when there are no more."""
    screen.write(f"\n[assistant] (end with a line that says {END_OF_REPLY!r})\n")
    screen.flush()
    lines: list[str] = []
    for line in replies:
        if line.rstrip("\n") == END_OF_REPLY:
            return "\n".join(lines)
        lines.append(line.rstrip("\n"))
    return "\n".join(lines) if lines else None
