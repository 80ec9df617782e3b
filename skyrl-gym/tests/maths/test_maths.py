r"""Extraction and comparison of answers, their limits on time and memory, and the end of all workers."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from worker_processes import SECONDS, is_running, wait_until, workers

from skyrl_gym import maths
from skyrl_gym.maths import Grade, __main__, choose_grader, final_answer, last_boxed, verify
from skyrl_gym.runtime.env_config import EnvConfig
from skyrl_gym.worker_pool import environment, serving

MODULE = "skyrl_gym.maths"
BOMB = "10^{10^{10}}"  # a single C operation that blocks the interpreter
BOMBS = [
    BOMB,
    "9999999999!",
    "9!!!!!!!",
    "(x+y+z)^{200}",
    r"\sin(" * 100 + "x" + ")" * 100,
    "(" * 2000 + "1" + ")" * 2000,
]
MEGABYTE = 1 << 20
PATIENT_SECONDS = 60.0  # a busy machine may need more than the default to start a worker

EXIT_PROGRAM = """
import os, sys, threading, time
from skyrl_gym import maths
from skyrl_gym.runtime.env_config import EnvConfig

assert maths.verify("1", "1").is_correct
(pid,) = maths._pool.workers().idle_pids()
print(pid, flush=True)
if sys.argv[1] == "dies at work":
    threading.Thread(target=maths.verify, args=("10^{10^{10}}", "1", 2.0)).start()
    while maths._pool.workers().idle_pids():
        time.sleep(0.01)
    os._exit(9)
"""
FORK_PROGRAM = """
import os, threading, time
from skyrl_gym import maths
from skyrl_gym.runtime.env_config import EnvConfig

maths._pool._size = 1
grades = []
at_work = threading.Thread(target=lambda: grades.append(maths.verify("10^{10^{10}}", "1", 4.0)))
at_work.start()
while not maths._pool.workers()._busy:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    assert maths.verify("2", "2").is_correct and not maths.verify("1", "2").is_correct
    maths.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
at_work.join()
assert grades[0].undecided == "timeout"
assert maths.verify("3", "3").is_correct
"""


@pytest.fixture(autouse=True, scope="module")
def workers_end_with_this_module() -> Iterator[None]:
    yield
    maths.close()
    assert workers(MODULE) == set()


@pytest.fixture
def no_workers() -> Iterator[None]:
    """Check that no workers run before and after the test, and that it leaks no file descriptors."""
    maths.close()
    n_open = n_descriptors()
    assert workers(MODULE) == set()
    yield
    maths.close()
    assert workers(MODULE) == set()
    assert n_descriptors() == n_open


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("42", "42"),
        ("42.0", "42"),
        ("1,000", "1000"),
        (r"\frac12", "0.5"),
        ("0.333333", "1/3"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("x = 42", "42"),
        (r"\{2, 1\}", r"\{1, 2\}"),
        (r"\text{blue}", "blue"),
        ("$42$", "42"),
        (r"42 \text{ cm}", "42"),
        ("50%", r"50\%"),
        (r"$50\%$", "0.5"),
        (r"\boxed{42}", "42"),
    ],
)
def test_equivalent_answers(answer: str, gold: str) -> None:
    assert verify(answer, gold, PATIENT_SECONDS) == Grade(answer, True)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("41", "42"),
        ("", "42"),
        ("   ", "42"),
        ("}", "42"),
        ("{", "42"),
        ("41 or 42", "42"),
        ("41, 42", "42"),
        ("42}, \\boxed{43", "42"),
        ("x", "y"),
        ("(1, 2)", "(2, 1)"),
        ("٤٢", "42"),
        ("４２", "42"),
        ("4\x002", "42"),
        ("42\ud800", "42"),
        ("[42]" * 900, "42"),
    ],
)
def test_different_answers(answer: str, gold: str) -> None:
    assert verify(answer, gold, PATIENT_SECONDS) == Grade(answer, False)


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:12])
def test_endless_answer_times_out_and_the_next_is_graded(bomb: str) -> None:
    verify("1", "1")
    before, n_open = workers(MODULE), n_descriptors()
    started = time.monotonic()
    gold = "3!" if "!" in bomb else "42"  # an operation that the ground truth lacks is not carried out
    assert verify(bomb, gold, timeout_seconds=0.5) == Grade(bomb, False, "timeout")
    assert time.monotonic() - started < 20
    assert verify("42", "42") == Grade("42", True)
    assert len(workers(MODULE)) == len(before) == 1
    assert workers(MODULE) != before
    assert n_descriptors() == n_open


def test_memory_limit_of_a_worker() -> None:
    limited = (
        "import resource; from skyrl_gym.isolation.kernel import set_limit; "
        f"set_limit(resource.RLIMIT_AS, {__main__.MEMORY_BYTES}, is_final=True); bytearray({__main__.MEMORY_BYTES})"
    )
    greedy = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=60)
    assert greedy.stderr.endswith("MemoryError\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the limits of other processes")
@pytest.mark.usefixtures("no_workers")
def test_kernel_limits_of_a_worker() -> None:
    verify("1", "1", timeout_seconds=2.0)
    (pid,) = workers(MODULE)
    assert resource.prlimit(pid, resource.RLIMIT_AS)[0] == __main__.MEMORY_BYTES
    assert 3 <= resource.prlimit(pid, resource.RLIMIT_CPU)[0] < 10


@pytest.mark.usefixtures("no_workers")
def test_worker_is_replaced_after_its_maximum_of_answers() -> None:
    with serving.AddressSpace() as address_space:
        before = address_space.n_bytes()
        with mmap(-1, 100 * MEGABYTE):
            assert address_space.n_bytes() >= before + 100 * MEGABYTE
    verify("1", "1")
    first = workers(MODULE)
    for _ in range(serving.MAX_ANSWERS - 2):
        verify("1", "1")
    assert workers(MODULE) == first
    verify("1", "1")
    assert workers(MODULE) == set()
    assert verify("1", "1").is_correct


@pytest.mark.usefixtures("no_workers")
def test_long_answer_is_never_sent_to_a_worker() -> None:
    assert verify("1" * (maths.MAX_ANSWER_CHARS + 1), "1").undecided == "length"
    assert verify("1" * MEGABYTE, "1" * MEGABYTE).undecided == "length"
    assert workers(MODULE) == set()
    assert verify("1" * maths.MAX_ANSWER_CHARS, "1").undecided is None


@settings(max_examples=60, deadline=None)
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


@pytest.mark.usefixtures("no_workers")
def test_threads_share_a_bounded_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths._pool, "_size", 2)
    seen: list[int] = []

    def one(n: int) -> Grade:
        seen.append(len(workers(MODULE)))
        return verify(BOMB, "1", timeout_seconds=0.3) if n % 16 == 7 else verify(str(n), str(n - n % 3))

    with ThreadPoolExecutor(32) as threads:
        grades = list(threads.map(one, range(64)))
    assert [grade.is_correct for grade in grades] == [n % 3 == 0 and n % 16 != 7 for n in range(64)]
    assert [grade.undecided for grade in grades] == ["timeout" if n % 16 == 7 else None for n in range(64)]
    assert max(seen) <= 2
    assert len(workers(MODULE)) <= 2  # none, if the last verdicts were of bombs
    assert verify("42", "42").is_correct
    assert 1 <= len(workers(MODULE)) <= 2


@pytest.mark.usefixtures("no_workers")
def test_dead_idle_workers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths._pool, "_size", 3)
    with ThreadPoolExecutor(3) as threads:  # each question starts its own worker
        list(threads.map(verify, "123", "123"))
    assert len(workers(MODULE)) == 3
    kill_workers()
    assert verify("42", "42") == Grade("42", True)
    assert len(workers(MODULE)) == 1


@pytest.mark.usefixtures("no_workers")
def test_answer_is_wrong_after_two_dead_workers(question_semaphore: threading.Semaphore) -> None:
    with ThreadPoolExecutor(1) as thread:
        grade = thread.submit(verify, BOMB, "42", 60.0)
        for _ in range(2):
            assert question_semaphore.acquire(timeout=SECONDS)
            kill_workers()
        assert grade.result(timeout=SECONDS) == Grade(BOMB, False, "crash")


@pytest.mark.usefixtures("no_workers")
def test_close_ends_busy_workers(question_semaphore: threading.Semaphore) -> None:
    with ThreadPoolExecutor(1) as thread:
        grade = thread.submit(verify, BOMB, "42", 60.0)
        assert question_semaphore.acquire(timeout=SECONDS)
        maths.close()
        assert workers(MODULE) == set()
        with pytest.raises(RuntimeError, match=r"workers of skyrl_gym\.maths were closed"):
            grade.result(timeout=SECONDS)
    assert verify("42", "42").is_correct


@pytest.mark.parametrize("how", ["ends", "dies at work"])
def test_workers_end_with_their_parent(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT_PROGRAM, how], capture_output=True, text=True, timeout=60)
    assert done.returncode == (9 if how == "dies at work" else 0), done.stderr
    assert done.stderr == ""
    wait_until(lambda: not is_running(int(done.stdout)))


def test_forked_process_has_separate_workers() -> None:
    done = subprocess.run([sys.executable, "-c", FORK_PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("no_workers")
def test_worker_that_does_not_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match=r"a worker of skyrl_gym\.maths did not start \(the process ended\)"):
        verify("42", "42")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        verify("42", "42")


def test_workers_get_the_module_path_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.syspath_prepend("relative")
    variables = environment()
    assert "secret" not in variables.values()
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == os.path.abspath("relative")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {42}", "42"),
        (r"\boxed 42.", "42"),
        (r"$\boxed42$", "42"),
        (r"\boxed{41} in \boxed", "41"),
        (r"\fbox{42}", "42"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{}", ""),
        (r"\boxed{1} \boxed{2", None),
        ("boxed{42}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{41}, no: \boxed{ 42 }", "42"),
        ("#### 42", "42"),
        ("#### 41\nWait.\n#### 42.\n", "42"),
        (r"#### \boxed{42}", "42"),
        (r"\boxed{41}, rather" + "\n#### 42", "42"),
        ("Answer: $x < 5$", "$x < 5$"),
        ("**Answer:** 42", "42"),
        ("**Final answer**: 42.", "42"),
        ("ANSWER:\n\n42\nfor sure", "42"),
        ("Answer: 42<|im_end|>", "42"),
        ("The answer is 3.5. I hope it is correct.", "3.5"),
        ("The answer is clear. Answer: 42", "42"),
        ("Answer = 42", "42"),
        ("Final Answer: The final answer is $42$. I hope it is correct.", "$42$"),
        (r"\boxed{42}" + "\nThe answer is above", "42"),
        (r"Answer: 42 \boxed{", r"42 \boxed{"),
        ("42", None),
        (r"\boxed{}", None),
        ("#### \n", None),
        ("", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "unit", [r"\boxed{", "####", "Answer:", "answer is ", "answer", "\\", "{", "}", " ", "\n", ". ", "*"]
)
def test_extraction_is_linear(unit: str) -> None:
    text = unit * (MEGABYTE // len(unit))
    started = time.process_time()
    for reply in (text, "Answer:" + text, r"\boxed{" + text, text + "x", "answer is" + text + "x"):
        final_answer(reply)
    assert time.process_time() - started < 5


def test_grade_reads_the_marked_answer() -> None:
    assert maths.grade(r"\boxed{\frac{84}{2}}", "42") == Grade(r"\frac{84}{2}", True)
    assert maths.grade("I say 42", "42") == Grade(None, False)


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


def test_missing_math_verify_raises_when_the_grader_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    graders = {"right": right, "math_verify": maths.grade}
    with pytest.raises(ModuleNotFoundError, match=r"needs math-verify: pip install '\./skyrl-gym\[maths\]'"):
        choose_grader("mine", {"grader": "math_verify"}, graders, "right")
    assert choose_grader("mine", {}, graders, "right") is right


def test_import_starts_nothing_and_loads_no_sympy() -> None:
    code = "import sys, threading, skyrl_gym.maths; print('sympy' in sys.modules, threading.active_count())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["False", "1"]


def kill_workers() -> None:
    killed = workers(MODULE)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, killed)))


def n_descriptors() -> int:
    return len(os.listdir("/dev/fd"))
