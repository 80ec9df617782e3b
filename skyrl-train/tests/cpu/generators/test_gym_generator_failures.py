"""Errors of an environment make its own rollout invalid, with the reason, and affect no other."""

import logging
import math
import os
import threading
from dataclasses import replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_kit.environments import METHODS, Journal
from train_kit.messages import user
from train_kit.rollouts import STEP, MakeStage, story, tokens_and_rewards
from train_kit.runs import read_lines

from skyrl_train.errors import EngineError
from skyrl_train.evaluate import dump_evaluation
from skyrl_train.generators.base import BatchMetadata
from skyrl_train.generators.conversation import TokenConversation
from skyrl_train.generators.metrics import rollout_metrics
from skyrl_train.inference_engines.base import EngineRequest, EngineResult
from skyrl_train.rendering.template import ChatTemplate
from skyrl_train.types import Trajectory

BATCHED = pytest.mark.parametrize("batched", [False, True], ids=["unbatched", "batched"])
METADATA = BatchMetadata(1, "train")


def deep_list(depth: int) -> list[Any]:
    """Return a list in a list in a list …"""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic_dict() -> dict[str, Any]:
    """Return a dict that holds itself."""
    value: dict[str, Any] = {}
    value["self"] = value
    return value


async def play_beside_others(make_stage: MakeStage, batched: bool, *extras: dict[str, Any]) -> list[Trajectory]:
    """Play a rollout with each of the `extras` between two good ones, and assert that these are unaffected."""
    good = [story("before", n_turns=2), story("after", n_turns=2)]
    stage = make_stage(batched=batched)
    stage.sampling = replace(stage.sampling, max_new_tokens=2)
    expected = await stage.play(good)
    bad = [story(f"bad {i}", **columns) for i, columns in enumerate(extras)]
    before, *played, after = await stage.play([good[0], *bad, good[1]])
    assert all(t.is_valid for t in expected)
    assert tokens_and_rewards([before, after]) == tokens_and_rewards(expected)
    assert len(set(stage.engine.ended)) == len(good) + len(bad), "every session ends"
    return played


def fail(error: BaseException, *_: object) -> None:
    raise error


def assert_invalid(bad: Trajectory, reason: str) -> None:
    assert (bad.is_valid, bad.stop_reason, bad.rewards) == (False, "env_error", None)
    assert reason in bad.error


@BATCHED
@pytest.mark.parametrize("method", METHODS)
async def test_an_environment_that_raises(
    make_stage: MakeStage, journal: Journal, method: str, batched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (bad,) = await play_beside_others(make_stage, batched, {"fails": method})
    named = "init" if method == "make" else method
    if method == "close":
        assert bad.is_valid, "the rollout was already complete"
        return
    assert_invalid(bad, f"story.{named} raised RuntimeError: no {method} today")
    assert journal.open_environments() == []
    assert len(journal.made) == (4 if method == "make" else 5)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.exc_info is not None


@BATCHED
async def test_turns_before_the_failure_are_kept(make_stage: MakeStage, journal: Journal, batched: bool) -> None:
    (bad,) = await play_beside_others(make_stage, batched, {"fails": "step", "fails_after": 2, "n_turns": 4})
    assert_invalid(bad, "no step today")
    assert [turn.reward for turn in bad.turns] == [0.25, 0.5, 0.0]  # the last turn is the failed one
    assert len(bad.response_ids) == bad.turns[-1].end
    assert bad.env_metrics == {}
    assert journal.open_environments() == []


INVALID: list[tuple[str, Any, str]] = [
    ("init", None, "init() returned None; return the prompt and a dict"),
    ("init", (None, {}), "init() returned prompt=None; it must be a list of messages"),
    ("init", ([], {}), "init() returned prompt=[]"),
    ("init", ("Hello", {}), "init() returned prompt='Hello'"),
    ("init", ([{"role": "user", "content": 3}], {}), "message 0 has content=3, which is not text"),
    ("step", None, "step() returned None; return BaseTextEnvStepOutput"),
    ("step", ("on", 1.0, False), "step() returned ('on', 1.0, False)"),
    *[
        ("step", {k: v for k, v in STEP.items() if k != name}, f"returned no '{name}'")
        for name in ("observations", "reward", "done")
    ],
    *[
        ("step", STEP | {"reward": reward}, f"returned reward={reward!r}; it must be a finite number")
        for reward in ("1", math.nan, -math.inf, [], [math.nan])
    ],
    ("step", STEP | {"reward": [1.0]}, "returned 1 rewards for a turn of 2 tokens"),
    ("step", STEP | {"postprocessed_action": 5}, "postprocessed_action=5; it must be a string"),
    ("step", STEP | {"metadata": {"modified_chat_history": "on"}}, "modified_chat_history='on'"),
    ("step", STEP | {"observations": "on"}, "observations='on'; they must be a list of messages"),
    ("step", STEP | {"observations": None}, "observations=None"),
    ("step", STEP | {"observations": [{"content": "on"}]}, "they must be a list of messages"),
    ("step", STEP | {"observations": [{"role": "user", "content": None}]}, "TypeError"),
    ("step", STEP | {"observations": [{"role": "user", "content": b"on"}]}, "TypeError"),
    ("step", STEP | {"done": np.array([True, False])}, "ValueError"),
    ("step", STEP | {"done": "no"}, "done='no'; it must be True or False"),
    ("step", STEP | {"done": None}, "done=None; it must be True or False"),
    ("step", STEP | {"reward": 1e308}, "reward=1e+308; it must be a finite number of magnitude <= 1e+12"),
    ("step", STEP | {"reward": [1e13, 0.0]}, "of magnitude <= 1e+12"),
    ("step", STEP | {"metadata": {"reward_components": {"a": -1e300}}}, "it must map names to finite numbers"),
    ("get_metrics", 5, "get_metrics() returned 5; it must be a dict"),
    ("get_metrics", None, "get_metrics() returned None"),
]
"""A method, its invalid return value, and part of the error."""


async def test_invalid_return_values_of_an_environment(make_stage: MakeStage, journal: Journal) -> None:
    bad = await play_beside_others(make_stage, True, *({"returns": {method: answer}} for method, answer, _ in INVALID))
    for t, (method, _, reason) in zip(bad, INVALID, strict=True):
        assert_invalid(t, f"story.{method} raised")
        assert_invalid(t, reason)
    assert journal.open_environments() == []


HALF = "\ud83d"  # half an emoji


class Unreadable:
    """An object without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ODD: list[tuple[str, Any]] = [
    ("init", ([user(HALF)], {})),
    ("step", STEP | {"observations": [{"role": "user", "content": HALF, "name": HALF}]}),
    ("step", STEP | {"postprocessed_action": HALF}),
    ("step", STEP | {"metadata": {"modified_chat_history": [user(HALF)]}}),
    ("step", STEP | {"metadata": {"reward_components": {HALF: 1.0}}}),
    ("step", STEP | {"metadata": {HALF: HALF}}),
    ("get_metrics", {HALF: 1, "text": HALF, "list": [{HALF: HALF}]}),
    ("get_metrics", {("a", 1): 2, None: 3, 4: Unreadable(), "digits": 10**5000, "inf": -(10**5000)}),
    ("get_metrics", {"array": np.arange(3), "number": np.float32(0.5), "set": {1}, "deep": deep_list(100)}),
    ("get_metrics", cyclic_dict()),
]


async def test_odd_answers_of_an_environment_are_trained_and_written(make_stage: MakeStage, tmp_path: Path) -> None:
    stage = make_stage(max_turns=2)
    stories = [story(str(i), returns={method: answer}) for i, (method, answer) in enumerate(ODD)]
    trajectories = await stage.generator.play([*stories, story("good")], stage.sampling, METADATA)
    assert [t.error for t in trajectories] == [None] * len(trajectories)
    metrics = rollout_metrics(trajectories)
    trajectories = [replace(t, env_extras={}) for t in trajectories]  # they hold the answer
    dump_evaluation(tmp_path, trajectories, metrics, stage.chat, None)
    rows = read_lines(tmp_path / "unknown.jsonl")
    assert [row["error"] for row in rows] == [None] * len(trajectories)


async def test_any_text_of_an_error_can_be_written(make_stage: MakeStage, journal: Journal, tmp_path: Path) -> None:
    errors = [
        (RuntimeError(HALF), "RuntimeError: ?"),
        (RuntimeError("\ud83d\ude00"), "RuntimeError: 😀"),
        (RuntimeError(Unreadable()), "its text cannot be read: str() raised RuntimeError"),
        (SystemExit(Unreadable()), "RuntimeError: SystemExit: its text cannot be read"),
        (RuntimeError("x" * 10_000), "x …"),
    ]
    stage = make_stage()
    for method, (error, text) in product(["make", "init", "step", "get_metrics"], errors):
        journal.do = {method: partial(fail, error)}
        trajectories = await stage.generator.play([story("a")], stage.sampling, METADATA)
        assert_invalid(trajectories[0], text)
        assert len(str(trajectories[0].error)) < 5000
        dump_evaluation(tmp_path, trajectories, rollout_metrics(trajectories), stage.chat, None)


@pytest.mark.parametrize("max_env_workers", [0, 4])
async def test_a_child_that_an_environment_forks_in_the_trainer_ends(
    make_stage: MakeStage, journal: Journal, max_env_workers: int
) -> None:
    children: list[int] = []
    journal.do = {"step": lambda: children.append(os.fork())}
    trajectories = await make_stage(skyrl_gym={"max_env_workers": max_env_workers}).play([story("a"), story("b")])
    assert [t.is_valid for t in trajectories] == [True, True]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6


LONG = "a" * 100_000  # 32 characters per token of the input limit would fit


@pytest.mark.parametrize(
    ("method", "answer", "stop_reason"),
    [
        ("init", ([user(LONG)], {}), "prompt_too_long"),
        ("step", STEP | {"observations": [user(LONG)]}, "length"),
        ("step", STEP | {"observations": [user("on")] * 50_000}, "length"),
        ("step", STEP | {"metadata": {"modified_chat_history": [user(LONG)]}}, "length"),
        ("step", STEP | {"postprocessed_action": LONG}, "env_error"),
    ],
)
async def test_text_that_cannot_fit_is_not_tokenized(
    make_stage: MakeStage, method: str, answer: Any, stop_reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = ChatTemplate.encode
    monkeypatch.setattr(ChatTemplate, "encode", lambda self, text: lengths.append(len(text)) or encode(self, text))
    t = await make_stage().play_story(returns={method: answer})
    assert t.stop_reason == stop_reason
    assert t.is_valid == (stop_reason == "length")
    assert max(lengths) < 50_000


async def test_a_row_that_is_nested_too_deeply_to_copy_is_invalid(make_stage: MakeStage) -> None:
    t = await make_stage().play_story(deep=deep_list(10_000))
    assert_invalid(t, "RecursionError")


async def test_a_reward_that_weights_make_too_large_is_invalid(make_stage: MakeStage) -> None:
    answer = STEP | {"done": True, "metadata": {"reward_components": {"a": 1e11}}}
    stage = make_stage(reward_weights={"a": 1e300})
    (t,) = await stage.generator.play([story("a", returns={"step": answer})], stage.sampling, METADATA)
    assert_invalid(t, "its reward inf must be finite and of magnitude <= 1e+12")


async def test_a_conversation_that_cannot_be_rendered_at_the_end_is_retried_and_then_invalid(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TokenConversation) -> None:
        raise TypeError("no such filter")

    monkeypatch.setattr(TokenConversation, "finish", fail)
    t = await make_stage(n_rollout_retries=1).play_story()
    assert t.n_attempts == 2
    assert_invalid(t, "cannot make a trajectory of the rollout: TypeError: no such filter")


@BATCHED
async def test_a_repeated_failure_shows_one_traceback(
    make_stage: MakeStage, batched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await make_stage(batched=batched, n_rollout_retries=2).play([story("a", fails="step"), story("b", fails="step")])
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.exc_info is not None for record in warnings] == [True, False, False]


async def test_numbers_of_any_type_are_rewards_and_late_observations_are_ignored(make_stage: MakeStage) -> None:
    answers = [STEP | {"reward": reward} for reward in (1, True, np.float32(1), np.int64(1))]
    answers += [STEP | {"observations": observations} for observations in (None, "", [])]
    stories = [story(str(i), returns={"step": answer | {"done": True}}) for i, answer in enumerate(answers)]
    for t in await make_stage().play(stories):
        assert t.rewards is not None, t.error
        assert (t.rewards[-1], type(t.rewards[-1])) == (1.0, float)


async def test_the_first_failure_is_the_reason(make_stage: MakeStage, journal: Journal) -> None:
    journal.do = dict.fromkeys(("step", "close"), partial(fail, OSError("socket closed")))
    t = await make_stage().play_story()
    assert t.error == "story.step raised OSError: socket closed"


async def test_an_unregistered_environment(make_stage: MakeStage) -> None:
    good, bad = await make_stage().play([story("a"), story("b", env_class="stroy")])
    assert good.is_valid
    assert_invalid(bad, "Did you mean 'story'?")


async def test_a_rollout_beyond_its_time_limit_keeps_its_turns(make_stage: MakeStage, journal: Journal) -> None:
    gate, n_steps = threading.Event(), count()
    journal.do = {"step": lambda: next(n_steps) == 1 and gate.wait()}
    t = await make_stage(trajectory_timeout_seconds=1).play_story()
    gate.set()
    assert (t.stop_reason, t.error, len(t.turns)) == ("trajectory_timeout", "it was not over after 1 s", 2)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (EngineError("out of memory"), "out of memory"),
        (RuntimeError("CUDA error: out of memory"), "generation failed with RuntimeError: CUDA error: out of memory"),
    ],
)
async def test_a_rollout_with_an_engine_error_is_retried(
    make_stage: MakeStage, error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(n_rollout_retries=1)
    stories = [story("a"), story("b")]
    expected, generate, n_calls = await stage.play(stories), stage.engine.generate, count()
    failing = {1}  # indices of calls

    async def fail_some(requests: list[EngineRequest]) -> list[EngineResult]:
        if next(n_calls) in failing:
            raise error
        return await generate(requests)

    monkeypatch.setattr(stage.engine, "generate", fail_some)
    trajectories = await stage.play(stories)
    assert sorted(t.n_attempts for t in trajectories) == [1, 2]
    assert tokens_and_rewards(trajectories) == tokens_and_rewards(expected)
    failing |= set(range(100))
    t = await stage.play_story()
    assert (t.stop_reason, t.error, t.n_attempts) == ("engine_error", text, 2)
