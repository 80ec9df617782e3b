"""Take the place of the model in a terminal."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from skyrl_gym.contract import checked_output, checked_prompt
from skyrl_gym.env_config import env_config_of
from skyrl_gym.envs.registration import EnvSpec, make
from skyrl_gym.methods import call
from skyrl_gym.rows import prompt_and_extras

END_OF_REPLY = "."


def play(
    spec: EnvSpec, row: Mapping[str, Any], env_config: Mapping[str, Any], replies: TextIO, screen: TextIO
) -> float | None:
    """Play an episode with what `replies` says, up to a line with a full stop for each turn.

    Returns the sum of the rewards; None where one cannot be told, or the replies end first.
    """
    prompt, extras = copy.deepcopy(prompt_and_extras(row))
    env = make(spec, env_config=env_config_of(env_config), extras=extras)
    with asyncio.Runner() as runner:
        try:
            _show(checked_prompt(call(env, runner, "init", prompt)), screen)
            rewards: list[Any] = []
            while (reply := _reply(replies, screen)) is not None:
                output = checked_output(call(env, runner, "step", reply))
                rewards.append(output["reward"])
                _show(output["observations"] or [], screen)
                screen.write(f"-- reward {output['reward']}\n")
                if output["done"]:
                    each = [sum(reward) if isinstance(reward, list) else reward for reward in rewards]
                    total = None if None in each else float(sum(each))
                    metrics = call(env, runner, "get_metrics")
                    screen.write(f"\nThe episode is over: {total} in {len(rewards)} turns. {metrics}\n")
                    return total
            return None
        finally:
            call(env, runner, "close")


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
