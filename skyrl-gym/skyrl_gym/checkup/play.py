"""Play an environment by hand in a terminal, in the model's place."""

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from skyrl_gym.checkup.rows import split_row
from skyrl_gym.envs.registration import EnvSpec, make
from skyrl_gym.runtime.env_config import copy_env_config
from skyrl_gym.runtime.methods import call_method
from skyrl_gym.runtime.validation import validate_prompt, validate_step_output

END_OF_REPLY = "."


def play(
    spec: EnvSpec, row: Mapping[str, Any], env_config: Mapping[str, Any], replies: TextIO, screen: TextIO
) -> float | None:
    """Play an episode with replies read from `replies`. A line with a single full stop ends a reply.

    Return the sum of the rewards, or None if a reward is None or the replies end before the episode does.
    """
    prompt, extras = copy.deepcopy(split_row(row))
    env = make(spec, env_config=copy_env_config(env_config), extras=extras)
    with asyncio.Runner() as runner:
        try:
            _print_messages(validate_prompt(call_method(env, runner, "init", prompt)), screen)
            rewards: list[Any] = []
            while (reply := _read_reply(replies, screen)) is not None:
                output = validate_step_output(call_method(env, runner, "step", reply))
                rewards.append(output["reward"])
                _print_messages(output["observations"] or [], screen)
                screen.write(f"-- reward {output['reward']}\n")
                if output["done"]:
                    totals = [sum(reward) if isinstance(reward, list) else reward for reward in rewards]
                    total = None if None in totals else float(sum(totals))
                    metrics = call_method(env, runner, "get_metrics")
                    screen.write(f"\nEpisode finished: reward {total} in {len(rewards)} turns, metrics {metrics}\n")
                    return total
            return None
        finally:
            call_method(env, runner, "close")


def _print_messages(messages: Sequence[Mapping[str, Any]], screen: TextIO) -> None:
    for message in messages:
        screen.write(f"\n[{message['role']}]\n{message['content']}\n")


def _read_reply(replies: TextIO, screen: TextIO) -> str | None:
    """Return the next reply, or None at the end of the input. The last reply may lack its full stop."""
    screen.write(f"\n[assistant] (end the reply with a line containing only {END_OF_REPLY!r})\n")
    screen.flush()
    lines: list[str] = []
    for line in replies:
        if line.rstrip("\n") == END_OF_REPLY:
            return "\n".join(lines)
        lines.append(line.rstrip("\n"))
    return "\n".join(lines) if lines else None
