"""Environments of the verifiers library, both generations: packages with `load_environment`, and tasksets.

Write the dataset with a script:

    from skyrl_gym.adapters.verifiers import rows
    datasets.Dataset.from_list(list(rows("my-env", {"difficulty": "hard"}))).to_parquet("train.parquet")

Then train with `environment.env_class=verifiers`, and `generator.max_turns` set to the episodes' maximum.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.adapters.async_env import AsyncEnv
from skyrl_gym.adapters.settings import NO_LIMIT, read_settings
from skyrl_gym.adapters.verifiers.package import load_package, module_name
from skyrl_gym.adapters.verifiers.turn import ChatTurn, EpisodeResult, parse_reply
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.row import read_extra_info, read_max_turns, to_python

COLUMN = "verifiers"
"""Field of `extra_info` with the environment's arguments. They are JSON, because parquet would merge the keys of dicts.
"""


RECORDED = {"id", "args", "env", "input"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersSettings:
    """The section `environment.skyrl_gym.verifiers`. Rows of `rows` contain `id`, `args` and `env`.

    id: the environment's name in verifiers: the package `my_env` is ``my-env``, ``my_env`` or ``owner/my-env``.
    args: the arguments of `load_environment`, or the fields of the taskset's config. They override the row's.
    env: the other fields of a v1 environment's config, ``--env.<field>`` on verifiers' command line.
    trained: the agent to train, if a v1 environment has several. Only for `skyrl-agent train verifiers`.
    describe_tools: True to list the tools in the system prompt.
    """

    id: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)
    trained: str = ""
    describe_tools: bool = True


def rows(
    env_id: str,
    args: Mapping[str, Any] | None = None,
    split: str = "train",
    *,
    env: Mapping[str, Any] | None = None,
    n_rows: int | None = None,
    is_chat: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield an environment's dataset as rows with `prompt`, `env_class`, `data_source`, `reward_spec`, `extra_info`.

    `split` is ``train`` or ``eval``. A taskset has only ``train``, and its arguments select the tasks. `n_rows` limits
    the number of rows. `is_chat=False` also accepts environments that only `skyrl-agent train verifiers` can play.

    Raises:
        ImportError: verifiers or the package is not installed, or their generations differ.
        ValueError: the package contains no environment, the environment rejects its arguments, the split is unknown, or
            the taskset is infinite and `n_rows` is None.
    """
    package = load_package(env_id, dict(args or {}), dict(env or {}), is_chat=is_chat)
    if package.is_infinite and n_rows is None:
        raise ValueError(f"{env_id} generates tasks forever; set n_rows")
    origin = {"id": env_id, "args": dict(args or {}), "env": dict(env or {})}
    dataset = itertools.islice(package.rows(split), n_rows)
    return (_row(row, origin, f"example {row['example_id']} of {env_id}") for row in dataset)


def _row(row: Mapping[str, Any], origin: Mapping[str, Any], name: str) -> dict[str, Any]:
    try:
        record = json.dumps({**origin, "input": row["input"]})
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{name} cannot be written as JSON: {problem}") from problem
    return {
        "prompt": row["prompt"],
        "env_class": "verifiers",
        "data_source": "/".join([origin["id"], *row["route"]]),
        "reward_spec": {"method": "verifiers", "ground_truth": row["answer"]},
        "extra_info": {"example_id": row["example_id"], COLUMN: record},
    }


class VerifiersEnv(AsyncEnv):
    """One rollout of a verifiers environment. The trainer samples the replies.

    The reward comes at the end, from the environment's rubric or its task. Its parts are in `reward_components`, and
    every score is a metric. If a tool call cannot be parsed, the model reads why. Failures of the environment raise.

    The trainer's `max_turns` ends the episode like the environment's own limit, and the episode is scored. The
    environment's limits on tokens and time do not apply, since the trainer has its own.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings, row_input = resolve_row(env_config, extras)
        if self.settings.trained:
            raise ValueError(
                f"environment.skyrl_gym.verifiers.trained={self.settings.trained}: a chat has one agent; remove it, or "
                "use skyrl-agent train verifiers"
            )
        self.max_turns = read_max_turns(extras, NO_LIMIT)
        package = load_package(self.settings.id, self.settings.args, self.settings.env)
        self._episode = package.episode(row_input, self.max_turns)
        self._turn: ChatTurn | None = None
        self._result: EpisodeResult | None = None
        self._n_invalid = 0
        self._has_started = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Set up the environment. A v0 environment starts with `prompt`, a v1 environment with the prompt of its task.

        Raises:
            VerifiersError: the environment failed.
        """
        if self._has_started:
            raise RuntimeError("this episode has started or is closed; create a new VerifiersEnv for the next episode")
        self._has_started = True
        self._loop = asyncio.get_running_loop()
        try:
            self._turn = await self._episode.start(prompt)
            return self._turn.prompt(self.settings.describe_tools), {}
        except BaseException:
            await self._episode.close()
            raise

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Pass the reply to the environment. Return its next messages, or the final score.

        Raises:
            VerifiersError: the environment or one of its services failed.
        """
        if self._turn is None:
            raise RuntimeError(
                "this episode is over; create a new environment" if self._has_started else "call init before step"
            )
        turn, self._turn = self._turn, None  # no step is possible after a failed one
        self.turns += 1
        reply = parse_reply(action, turn.tools)
        self._n_invalid += reply.problem is not None
        result = await self._episode.reply(reply)
        if isinstance(result, ChatTurn):
            self._turn = result
            rewritten: dict[str, Any] = {}
            observations = result.observations()
            if not result.n_read:
                prompt = result.prompt(self.settings.describe_tools)
                n_history = max(1, len(prompt) - 1)  # the history must not be empty
                rewritten["modified_chat_history"], observations = prompt[:n_history], prompt[n_history:]
            return BaseTextEnvStepOutput(observations=observations, reward=0.0, done=False, metadata=rewritten)
        self._result = result
        metadata: dict[str, Any] = {"stop_condition": result.stop_condition}
        if result.components:
            metadata["reward_components"] = dict(result.components)
        return BaseTextEnvStepOutput(observations=[], reward=result.reward, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Return every score of the episode, and the numbers of turns and of replies with invalid calls."""
        scores = self._result.metrics if self._result is not None else {}
        return {**scores, "steps": self.turns, "invalid_actions": self._n_invalid}

    async def _release(self) -> None:
        self._end()
        await self._episode.close()

    def _abandon(self) -> None:
        """Clean up in the episode's event loop, if it is still running."""
        self._end()
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._episode.close(), self._loop)

    def _end(self) -> None:
        self._has_started, self._turn = True, None


def resolve_row(
    env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]
) -> tuple[VerifiersSettings, Mapping[str, Any]]:
    """Return a row's settings, overridden by the configuration, and the input of its episode.

    Raises:
        ValueError: `rows` did not write the row, or the configuration is of another environment.
        InvalidSettings: the configuration is invalid.
    """
    text = read_extra_info(extras).get(COLUMN)
    try:
        record: dict[str, Any] = json.loads(text or "{}")
    except (TypeError, ValueError):
        record = {}
    if not isinstance(record, dict) or not record.keys() >= RECORDED:
        found = f"extra_info.{COLUMN}={str(text)[:80]!r}" if text else f"no extra_info.{COLUMN}"
        raise ValueError(
            f"the row has {found}; write the dataset with skyrl_gym.adapters.verifiers.rows, which stores the "
            "environment's arguments there"
        )
    section = to_python(env_config or {})
    if section.get("id") and module_name(section["id"]) != module_name(record["id"]):
        raise ValueError(
            f"environment.skyrl_gym.verifiers.id={section['id']!r}, but the row is of {record['id']!r}; "
            "remove the id, or write the dataset again"
        )
    for name in ("args", "env"):
        if isinstance(arguments := section.get(name) or {}, dict):  # otherwise the settings raise
            section[name] = {**record[name], **arguments}
    section["id"] = record["id"]
    return read_settings(VerifiersSettings, "verifiers", section, extras), record["input"]
