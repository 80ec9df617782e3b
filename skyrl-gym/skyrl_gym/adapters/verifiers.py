"""Environments of the library verifiers, of both its generations: packages with `load_environment`, and tasksets.

A script writes their dataset:

    from skyrl_gym.adapters.verifiers import rows
    datasets.Dataset.from_list(list(rows("my-env", {"difficulty": "hard"}))).to_parquet("train.parquet")

and training on it needs `environment.env_class=verifiers`, and as many `generator.max_turns` as an episode may have.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.adapters.awaited_env import AwaitedEnv
from skyrl_gym.adapters.settings import NO_LIMIT, extra_info, plain, read_settings
from skyrl_gym.adapters.verifiers_package import load_package, module_name
from skyrl_gym.adapters.verifiers_turn import Outcome, Turn, read_reply
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.row import max_turns_of

COLUMN = "verifiers"
"""Where in `extra_info` a row keeps, as JSON, what its environment is made of: parquet would mix up dicts."""


RECORDED = {"id", "args", "env", "input"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersSettings:
    """The section `environment.skyrl_gym.verifiers`. Rows of `rows` bring `id`, `args` and `env` along.

    id: the environment, as verifiers names it: the package `my_env` is ``my-env``, ``my_env`` or ``owner/my-env``.
    args: of `load_environment`, or the fields of the taskset's config; over those of the row.
    env: the other fields of a v1 environment's config, ``--env.<field>`` on verifiers' command line.
    describe_tools: whether the system prompt lists the tools.
    """

    id: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)
    describe_tools: bool = True


def rows(
    env_id: str,
    args: Mapping[str, Any] | None = None,
    split: str = "train",
    *,
    env: Mapping[str, Any] | None = None,
    n_rows: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The dataset of an environment as rows of ours: `prompt`, `env_class`, `data_source`, `reward_spec`, `extra_info`.

    `split` is ``train`` or ``eval``; which tasks a taskset has is up to its arguments, and it knows ``train`` alone.
    At most `n_rows` of them.

    Raises:
        ImportError, ValueError: see `load_package`; or the split is unknown, or the taskset never ends.
    """
    package = load_package(env_id, dict(args or {}), dict(env or {}))
    if package.is_infinite and n_rows is None:
        raise ValueError(f"{env_id} makes tasks forever; say how many with n_rows")
    origin = {"id": env_id, "args": dict(args or {}), "env": dict(env or {})}
    found = itertools.islice(package.rows(split), n_rows)
    return (_row(row, origin, f"example {row['example_id']} of {env_id}") for row in found)


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


class VerifiersEnv(AwaitedEnv):
    """One rollout of a verifiers environment, for which the trainer samples the replies.

    The reward comes at the end, from the environment's rubric or its task; its parts are `reward_components`, and every
    score is a metric. A call of a tool that cannot be read is explained to the model. What fails in the environment,
    and not in the model, raises.

    At the trainer's `max_turns` the episode ends as at the environment's own, and is scored. The environment's limits
    in tokens and seconds of the model do not count: those are the trainer's.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        record = _record(extras)
        self.settings = read_settings(VerifiersSettings, "verifiers", _with_origin(env_config, record), extras)
        self.max_turns = max_turns_of(extras, NO_LIMIT)
        package = load_package(self.settings.id, self.settings.args, self.settings.env)
        self._episode = package.episode(record["input"], self.max_turns)
        self._turn: Turn | None = None
        self._outcome: Outcome | None = None
        self._n_invalid = 0
        self._has_begun = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Set the environment up. A v0 environment begins with `prompt`, a v1 environment with that of its task.

        Raises:
            VerifiersError: the environment failed.
        """
        if self._has_begun:
            raise RuntimeError("this episode has begun, or is closed; make a new VerifiersEnv for the next one")
        self._has_begun = True
        self._loop = asyncio.get_running_loop()
        try:
            self._turn = await self._episode.begin(prompt)
            return self._turn.prompt(self.settings.describe_tools), {}
        except BaseException:
            await self._episode.close()
            raise

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Hand the reply to the environment, until it is over and scored.

        Raises:
            VerifiersError: the environment failed, or what it depends on.
        """
        if self._turn is None:
            raise RuntimeError("this episode is over; make a new one" if self._has_begun else "call init before step")
        turn, self._turn = self._turn, None  # a step that fails is the last one
        self.turns += 1
        reply = read_reply(action, has_tools=bool(turn.tools))
        self._n_invalid += reply.problem is not None
        result = await self._episode.reply(reply)
        if isinstance(result, Turn):
            self._turn = result
            return self._next(result)
        self._outcome = result
        metadata: dict[str, Any] = {"stop_condition": result.stop_condition}
        if result.components:
            metadata["reward_components"] = dict(result.components)
        return BaseTextEnvStepOutput(observations=[], reward=result.reward, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Every score of the episode, turns, and replies whose calls could not be read."""
        scores = self._outcome.metrics if self._outcome is not None else {}
        return {**scores, "steps": self.turns, "invalid_actions": self._n_invalid}

    async def _release(self) -> None:
        self._end()
        await self._episode.close()

    def _abandon(self) -> None:
        """Clean up in the event loop of the episode, if that still turns."""
        self._end()
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._episode.close(), self._loop)

    def _end(self) -> None:
        self._has_begun, self._turn = True, None

    def _next(self, turn: Turn) -> BaseTextEnvStepOutput:
        metadata: dict[str, Any] = {}
        observations = turn.observations()
        if not turn.n_read:
            prompt = turn.prompt(self.settings.describe_tools)
            n_history = max(1, len(prompt) - 1)  # a history of nothing is none
            metadata["modified_chat_history"], observations = prompt[:n_history], prompt[n_history:]
        return BaseTextEnvStepOutput(observations=observations, reward=0.0, done=False, metadata=metadata)


def _record(extras: Mapping[str, Any]) -> dict[str, Any]:
    """What `rows` wrote into the row."""
    written = extra_info(extras).get(COLUMN)
    try:
        record: dict[str, Any] = json.loads(written or "{}")
    except (TypeError, ValueError):
        record = {}
    if not isinstance(record, dict) or not record.keys() >= RECORDED:
        found = f"extra_info.{COLUMN}={str(written)[:80]!r}" if written else f"no extra_info.{COLUMN}"
        raise ValueError(
            f"the row has {found}; write the dataset with skyrl_gym.adapters.verifiers.rows, which puts there what the "
            "environment is made of"
        )
    return record


def _with_origin(env_config: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The section with the row's environment in it; arguments of the section come on top."""
    given = plain(dict(env_config or {}))
    if given.get("id") and module_name(given["id"]) != module_name(record["id"]):
        raise ValueError(
            f"environment.skyrl_gym.verifiers.id={given['id']!r}, but the row is of {record['id']!r}; "
            "leave the id out, or write the dataset again"
        )
    for name in ("args", "env"):
        if isinstance(own := given.get(name) or {}, dict):  # else the settings say what is wrong with it
            given[name] = {**record[name], **own}
    return {**given, "id": record["id"]}
