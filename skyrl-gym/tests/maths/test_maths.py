r"""Extraction and comparison of answers. `graders/math_verify.yaml` has answers that are, and are not, equivalent."""

import resource
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gym_kit.processes import SECONDS, kill, no_leaks, run_python, workers
from gym_kit.texts import linear_time, long_text
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from skyrl_gym import maths
from skyrl_gym.maths import Grade, __main__, choose_grader, final_answer, verify
from skyrl_gym.runtime.env_config import EnvConfig

MODULE = "skyrl_gym.maths"
BOMB = "10^{10^{10}}"  # a single C operation that blocks the interpreter
BOMBS = [BOMB, r"\sin(" * 100 + "x" + ")" * 100]
MORE_BOMBS = ["9!!!!!!!", "9999999999!", "(x+y+z)^{200}", "(" * 2000 + "1" + ")" * 2000]
PATIENT_SECONDS = 60.0  # a busy machine may need more than the default


@pytest.fixture(autouse=True, scope="module")
def workers_end_with_this_module() -> Iterator[None]:
    with no_leaks():
        yield
        maths.close()


@pytest.mark.parametrize(
    "bomb",
    [*BOMBS, *(pytest.param(bomb, marks=pytest.mark.nightly) for bomb in MORE_BOMBS)],
    ids=lambda bomb: bomb[:12],
)
def test_endless_answer_times_out_and_the_next_is_graded(bomb: str) -> None:
    verify("1", "1", PATIENT_SECONDS)
    before = workers(MODULE)
    gold = "3!" if "!" in bomb else "42"  # an operation that the ground truth lacks is not carried out
    assert verify(bomb, gold, timeout_seconds=0.3) == Grade(bomb, False, "timeout")
    assert verify("42", "42", PATIENT_SECONDS) == Grade("42", True)
    (after,) = workers(MODULE)
    assert before != {after}
    if sys.platform == "linux":
        assert resource.prlimit(after, resource.RLIMIT_AS)[0] == __main__.MEMORY_BYTES


def test_answer_is_wrong_after_two_dead_workers(question_semaphore: threading.Semaphore) -> None:
    with ThreadPoolExecutor(1) as thread:
        grade = thread.submit(verify, BOMB, "42", PATIENT_SECONDS)
        for _ in range(2):
            assert question_semaphore.acquire(timeout=SECONDS)
            kill(workers(MODULE))
        assert grade.result(timeout=SECONDS) == Grade(BOMB, False, "crash")


def test_long_answer_is_never_sent_to_a_worker() -> None:
    maths.close()
    assert verify("1" * (maths.MAX_ANSWER_CHARS + 1), "1").undecided == "length"
    assert verify(long_text("1"), long_text("1")).undecided == "length"
    assert workers(MODULE) == set()
    assert verify("1" * maths.MAX_ANSWER_CHARS, "1").undecided is None


@pytest.mark.parametrize(
    "answer",
    ["   ", "}", "{", "42}, \\boxed{43", "４２", "4\x002", "42\ud800", "[42]" * 300],
    ids=lambda a: ascii(a[:9]),
)
def test_malformed_answer_is_wrong(answer: str) -> None:
    assert verify(answer, "42", PATIENT_SECONDS) == Grade(answer, False)


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=40) | st.text(alphabet=r"\{}()[]^_$%=<,.!+-*/ 0123456789xefracsqtboxd", max_size=40))
def test_any_answer_is_graded(answer: str) -> None:
    grade = verify(answer, "271828.5")
    assert not grade.is_correct
    assert grade.answer == answer


@pytest.mark.parametrize("gold", ["", "}", "  "])
def test_invalid_ground_truth_raises(gold: str) -> None:
    with pytest.raises(ValueError, match=r"ground_truth='.*' contains nothing that math-verify can parse"):
        verify("42", gold)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_timeout_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"timeout_seconds=.* must be a positive number"):
        verify("42", "42", timeout_seconds=seconds)


@pytest.mark.parametrize(
    "unit", [r"\boxed{", "####", "Answer:", "answer is ", "answer", "\\", "{", "}", " ", "\n", ". ", "*"]
)
def test_extraction_is_linear(unit: str) -> None:
    text = long_text(unit)
    with linear_time():
        for reply in (text, "Answer:" + text, r"\boxed{" + text, text + "x", "answer is" + text + "x"):
            final_answer(reply)


def right(reply: str, ground_truth: str) -> Grade:
    return Grade(reply, True)


@pytest.mark.parametrize("config", [dict, EnvConfig, OmegaConf.create], ids=["dict", "EnvConfig", "OmegaConf"])
def test_grader_is_chosen_by_name(config: Any) -> None:
    graders = {"right": right, "math_verify": maths.grade}
    assert choose_grader("mine", config({"grader": "math_verify"}), graders, "right") is maths.grade
    assert choose_grader("mine", config({"grader": None}), graders, "right") is right
    assert choose_grader("mine", config({}), graders, "right") is right
    assert choose_grader("mine", None, graders, "right") is right


@pytest.mark.parametrize("name", ["math-verify", "", 3, False, ["right"]])
def test_unknown_grader_is_named_with_the_choices(name: object) -> None:
    with pytest.raises(
        ValueError, match=r"environment\.skyrl_gym\.mine\.grader=.* is unknown; use one of right, other"
    ):
        choose_grader("mine", {"grader": name}, {"right": right, "other": right}, "right")


def test_import_starts_nothing_and_loads_no_sympy() -> None:
    code = "import sys, threading, skyrl_gym.maths; print('sympy' in sys.modules, threading.active_count())"
    assert run_python(code).stdout.split() == ["False", "1"]
