"""Play an environment by hand in a terminal, in the model's place."""

import asyncio
import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from skyrl_gym.checkup.rows import split_row
from skyrl_gym.envs.registration import EnvSpec, make
from skyrl_gym.images import EncodedImage
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
    printer = _Printer(screen)
    with asyncio.Runner() as runner:
        try:
            printer.print_messages(validate_prompt(call_method(env, runner, "init", prompt)))
            rewards: list[Any] = []
            while (reply := _read_reply(replies, screen)) is not None:
                output = validate_step_output(call_method(env, runner, "step", reply))
                rewards.append(output["reward"])
                printer.print_messages(output["observations"] or [])
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


class _Printer:
    """A printer of messages. It writes images to files, and prints their paths."""

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen
        self._folder: Path | None = None
        self._n_images = 0

    def print_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for message in messages:
            content = message["content"]
            texts = [self._format_part(part) for part in content] if isinstance(content, list) else [content]
            self._screen.write(f"\n[{message['role']}]\n{''.join(texts)}\n")

    def _format_part(self, part: Mapping[str, Any]) -> str:
        if part["type"] != "image":
            return str(part["text"])
        image: EncodedImage = part["image"]
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="skyrl-play-"))
        self._n_images += 1
        path = self._folder / f"{self._n_images}.{image.mime_type.rpartition('/')[2]}"
        path.write_bytes(image.content)
        return f"[{image.width} x {image.height}: {path}]"


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
