"""Episodes without a model: an environment gets fixed replies, and its return values are validated.

An episode is a generator of calls, so it can be played alone, interleaved with other episodes, or concurrently.
"""

from __future__ import annotations

import copy
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from skyrl_gym.checkup.executor import CallResult, EnvCall, Executor
from skyrl_gym.checkup.rows import split_row
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.registration import EnvSpec, make
from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import EncodedImage, find_images
from skyrl_gym.runtime.env_config import EnvConfig, copy_env_config
from skyrl_gym.runtime.methods import async_method
from skyrl_gym.runtime.validation import reward_components, validate_metrics, validate_prompt, validate_step_output

MAX_REPLY_CHARS = 1_000_000
MAX_ERROR_CHARS = 500

REPLIES: Mapping[str, str] = {
    "empty text": "",
    "plain text": "I think that the answer is 42.",
    "whitespace": " \n\t ",
    "unclosed tags": "<think><answer><tool_call>",
    "broken JSON": '<tool_call>{"name": "x", "arguments": {</tool_call>',
    "unusual characters": "\x00\ufffd\u0664\u0662\U0001f600 \\boxed{\u221e} #### \u0664\u0662",
    "a lone surrogate": "\ud83d",
    "a million characters": "<answer>" * (MAX_REPLY_CHARS // 8),
}
"""Replies by name: what a model writes before it has learned the format, and worse."""

THREAD_HINT = (
    "training makes calls in threads other than the main one, or with environment.skyrl_gym.isolation=process in the "
    "main thread of a separate process"
)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

T = TypeVar("T")


class RuleViolation(Exception):
    """The environment breaks a rule. The message says how."""


class Hang(RuleViolation):
    """A call does not return, so no other call can be made."""


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """The inputs of an episode. Each episode of a row gets its own copy."""

    spec: EnvSpec
    prompt: ConversationType
    extras: dict[str, Any]
    env_config: EnvConfig

    @classmethod
    def from_row(cls, spec: EnvSpec, row: Mapping[str, Any], env_config: Mapping[str, Any]) -> EpisodeSpec:
        """Create the spec of a dataset row. Raises ValueError if training would reject the row."""
        prompt, extras = split_row(row)
        return cls(spec, prompt, extras, copy_env_config(env_config))

    @property
    def max_turns(self) -> int:
        """Maximum number of turns of an episode."""
        return int(self.extras["max_turns"])

    def copy(self) -> EpisodeSpec:
        """Return a deep copy that shares only the spec."""
        return EpisodeSpec(self.spec, *copy.deepcopy((self.prompt, self.extras, self.env_config)))


@dataclass(slots=True)
class RecordedEpisode:
    """An episode that was played."""

    env_class: type = object
    outputs: list[BaseTextEnvStepOutput] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)  # return values of all methods but `close`
    trained_values: list[str] = field(default_factory=list)  # what training reads of them, recorded on arrival
    images: list[EncodedImage] = field(default_factory=list)
    seconds: float = 0.0  # of the slowest call

    @property
    def is_done(self) -> bool:
        """True if the environment ended the episode."""
        return bool(self.outputs) and bool(self.outputs[-1]["done"])


Player = Generator[EnvCall, CallResult, RecordedEpisode]
"""Generator that plays an episode: yields the next call and is sent its result."""


def play_all(players: Sequence[Player], executor: Executor, concurrent: bool = False) -> list[RecordedEpisode]:
    """Play episodes together, one call of each in turn. With `concurrent`, these calls run at the same time.

    Raises:
        RuleViolation: an episode broke a rule. All other episodes were played to their end.
        Hang: a call does not return. All other episodes were abandoned.
    """
    episodes: dict[int, RecordedEpisode] = {}
    violations: list[RuleViolation] = []
    calls = {i: next(player) for i, player in enumerate(players)}
    while calls:
        groups = [list(calls)] if concurrent else [[i] for i in calls]
        for group in groups:
            results = executor.run([calls.pop(i) for i in group])
            for i, result in zip(group, results, strict=True):
                try:
                    calls[i] = players[i].send(result)
                except StopIteration as end:
                    episodes[i] = end.value
                except Hang:
                    raise
                except RuleViolation as violation:
                    violations.append(violation)
    if violations:
        raise violations[0]
    return [episodes[i] for i in range(len(players))]


def play_episode(task: EpisodeSpec, replies: Sequence[str]) -> Player:
    """Play an episode with these replies (names of `REPLIES`) until it is done, and close it twice.

    Raises:
        RuleViolation: a call broke a rule. The environment has been closed.
        Hang: a call does not return.
    """
    episode = RecordedEpisode()
    constructor = EnvCall(partial(make, task.spec, env_config=task.env_config, extras=task.extras))
    env = yield from _call(episode, constructor, "the constructor")
    episode.env_class = type(env)
    try:
        yield from _play_turns(env, task.prompt, replies, episode)
    except Hang:
        raise
    except RuleViolation as violation:
        try:
            yield from _call(episode, _method_call(env, "close"), "close()")
        except RuleViolation as later:
            raise type(later)(f"{violation}. Then {later}") from violation
        raise
    for context in ("", ", the second time"):
        yield from _call(episode, _method_call(env, "close"), "close()", context)
    return episode


def _play_turns(
    env: Any, prompt: ConversationType, replies: Sequence[str], episode: RecordedEpisode
) -> Generator[EnvCall, CallResult, None]:
    messages = yield from _call(episode, _method_call(env, "init", prompt), "init()", "", _validate_prompt)
    episode.trained_values.append(repr(messages))
    episode.images += find_images(messages)
    for name in replies:
        step = _method_call(env, "step", REPLIES[name])
        output = yield from _call(episode, step, "step()", f", for the reply: {name}", _validate_output)
        episode.outputs.append(output)
        episode.trained_values.append(repr((output["observations"], output["reward"], bool(output["done"]))))
        if output["done"]:
            break
        episode.images += find_images(output["observations"])
    get_metrics = _method_call(env, "get_metrics")
    episode.metrics = yield from _call(episode, get_metrics, "get_metrics()", "", validate_metrics)
    episode.trained_values.append(repr(episode.metrics))


def _method_call(env: Any, method: str, *args: Any) -> EnvCall:
    """Return a method call as training would make it."""
    native = async_method(env, method)
    if native is not None:
        return EnvCall(partial(native, *args), is_async=True)
    return EnvCall(partial(methodcaller(method, *args), env))


def _call(
    episode: RecordedEpisode,
    call: EnvCall,
    method: str,
    context: str = "",
    validate: Callable[[Any], Any] | None = None,
) -> Generator[EnvCall, CallResult, Any]:
    """Make a call and return its value. If there is a `validate`, record the value as an answer of the episode."""
    result = yield call
    episode.seconds = max(episode.seconds, result.seconds)
    if validate is None:
        return validate_result(result, method, context, lambda answer: answer)
    answer = validate_result(result, method, context, validate)
    episode.answers.append(result.value)
    return answer


def validate_result(result: CallResult, method: str, context: str, validate: Callable[[Any], T]) -> T:
    """Return the validated value of a call. `validate` may raise InvalidAnswer.

    Raises:
        RuleViolation: the call raised, or its value is invalid.
        Hang: the call did not return.
    """
    if result.hangs_at is not None:
        raise Hang(f"{method} did not return within {result.seconds:g} s{context}. It hangs in\n{result.hangs_at}")
    if result.error is not None:
        hint = f"; {THREAD_HINT}" if "thread" in str(result.error) else ""
        raise RuleViolation(f"{method} raised {_describe(result.error)}{context}{hint}") from result.error
    try:
        return validate(result.value)
    except InvalidAnswer as error:
        raise RuleViolation(f"{str(error)[:MAX_ERROR_CHARS]}{context}") from error
    except Exception as error:  # even inspecting the value may raise
        raise RuleViolation(f"{method} returned a value that raises {_describe(error)}{context}") from error


def _validate_prompt(answer: Any) -> ConversationType:
    prompt = validate_prompt(answer)
    _check_contents(prompt, "init()")
    return prompt


def _validate_output(answer: Any) -> BaseTextEnvStepOutput:
    output = validate_step_output(answer)
    reward_components(output)
    _check_contents([] if output["done"] else output["observations"], "step()")
    return output


def _check_contents(messages: ConversationType, method: str) -> None:
    for message in messages:
        if not isinstance(message["content"], str | list):
            raise InvalidAnswer(
                f"{method} returned a message with content={message['content']!r}; write text, or a list of parts"
            )


def _describe(error: BaseException) -> str:
    """Format an error and the environment's line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    own = [frame for frame in theirs if not frame.filename.startswith(LIBRARIES)] or theirs
    at = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}{at}"
