"""Well-behaved programs, and programs that look around. `test_attacks.py` has the hostile ones."""

import errno
import json
import math
import os
import resource
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from gym_kit.containment import supported_levels
from gym_kit.processes import no_leaks, wait_until

from skyrl_gym.error import ToolFailure
from skyrl_gym.isolation import FunctionCall, ProgramLimits, ProgramResult, Stdin, isolation_level, program, run_program
from skyrl_gym.isolation.program import Isolation, Level, level_for, run_once

SMALL = ProgramLimits(seconds=1.0, memory_bytes=256 << 20, output_bytes=100_000, file_bytes=4 << 20, disk_bytes=8 << 20)
LEVELS = supported_levels()


@pytest.fixture(params=[*LEVELS[:-1], pytest.param("limits", marks=[pytest.mark.nightly] * (len(LEVELS) > 1))])
def level(request: pytest.FixtureRequest) -> Level:
    """Return each level. Well-behaved programs meet more obstacles at `landlock` than at `limits`."""
    level: Level = request.param
    return level


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Check that programs leave no processes and files behind, and return the folder of their folders.

    Asking for `tmp_path` makes pytest create its base folder now, before the temporary folder is another one.
    """
    with tempfile.TemporaryDirectory(prefix="programs-") as folder, no_leaks():
        os.chmod(folder, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert os.listdir(folder) == []
        environments = [process.info["environ"] or {} for process in psutil.process_iter(["environ"])]
        assert [one for one in environments if one.get("HOME", "").startswith(folder)] == []


@pytest.mark.parametrize(
    ("source", "stdin", "stdout"),
    [
        ("import sys; print(input()[::-1]); print('é', file=sys.stderr)", "abc\n", "cba\n"),
        ("print(open('/dev/stdin').read()[::-1], __file__)", "cba", "abc program.py\n"),
        ("import sys; sys.stdout.write(sys.stdin.read())", "é\n" * 250_000, "é\n" * 250_000),
        ("import tempfile, os; tempfile.TemporaryFile().write(b'text'); print(os.listdir('.'))", "", "[]\n"),
        ("import threading, time\nthreading.Timer(0.3, print, ['late']).start()", "", "late\n"),
        ("import atexit\natexit.register(print, 'late')", "", "late\n"),
        ("import sys\nsys.__stdout__.write('plain')", "", "plain"),
        (
            "import io, os, sys, atexit\nsys.stdout = out = io.StringIO()\n"
            "@atexit.register\ndef write(): sys.__stdout__.write(out.getvalue())\nprint('fast')",
            "",
            "fast\n",
        ),
    ],
    ids=["streams", "stdin by name", "megabyte", "temporary file", "thread", "exit handler", "__stdout__", "buffer"],
)
def test_input_and_output(source: str, stdin: str, stdout: str, level: Level) -> None:
    result = run_once(source, stdin, ProgramLimits(output_bytes=1 << 20), level)
    assert (result.end, result.status, result.stdout) == ("exit", 0, stdout), result.stderr
    assert result.is_success
    assert result.stderr == ("é\n" if "stderr" in source else "")


def test_every_run_starts_a_fresh_process(level: Level) -> None:
    source = "import os\nprint(len(os.listdir('.')), input())\nopen('left', 'w').close()\nos.makedirs('a/b')"
    results = list(run_program(source, [Stdin(str(i)) for i in range(5)], SMALL, level))
    assert [result.stdout for result in results] == [f"0 {i}\n" for i in range(5)]


def test_function_and_method_calls(level: Level) -> None:
    source = "class Solution:\n    def add(self, a, b): return (a + b, {a})\ndef sub(a, b): return a - b"
    calls = [FunctionCall("add", [2, 3]), FunctionCall("sub", [2, 3]), FunctionCall("mul")]
    method, function, missing = run_program(source, calls, SMALL, level)
    assert (method.value, function.value) == ([5, [2]], -1)
    assert "KeyError: 'mul'" in missing.stderr
    assert not missing.is_success
    with pytest.raises(ValueError, match="Expecting value"):
        _ = missing.value


def test_called_program_is_a_regular_module_but_not_main(level: Level) -> None:
    source = (
        "import pickle\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: int = 0\n"
        "def f(n: int): return [pickle.loads(pickle.dumps(Point(n))).x, f.__annotations__['n'] is int]\n"
        "if __name__ == '__main__': raise SystemExit(3)"
    )
    called, main = run_program(source, [FunctionCall("f", [3]), Stdin()], SMALL, level)
    assert (called.value, called.status, main.status) == ([3, True], 0, 3)


@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit('no')", 1, ""),
        ("import sys; sys.exit(2**80 + 3)", 3, ""),
        ("1 / 0", 1, 'File "program.py", line 1, in <module>'),
        ("def", 1, "SyntaxError"),
        ("print('\0')", 1, "null bytes"),
        ("print(chr(0xd800))", 0, ""),
        ("'\ud800'", 1, "surrogates not allowed"),
        ("quit(4)", 4, ""),
        ("import numpy; print(numpy.ones(3).sum())", 0, ""),
    ],
)
def test_exit_status_and_errors(source: str, status: int, message: str) -> None:
    result = run_once(source)
    assert (result.end, result.status) == ("exit", status)
    assert message in result.stderr
    if "print" in source and status == 0:
        assert result.stdout


def test_cpu_time_is_limited_and_waiting_is_not(level: Level) -> None:
    source = (
        "import os, time\nkind = input()\n"
        "if kind == 'children' and os.fork(): os.wait()\n"
        "elif kind == 'wait': time.sleep(0.5)\n"
        "else:\n  while True: pass"
    )
    runs = [Stdin("compute"), Stdin("wait"), Stdin("children")]
    computes, waits, in_children = run_program(source, runs, ProgramLimits(seconds=60.0, cpu_seconds=0.2), level)
    assert (computes.end, waits.end, in_children.end) == ("time", "exit", "time")
    assert 0.2 <= computes.cpu_seconds < 2
    assert waits.cpu_seconds < 0.2 < waits.seconds


def test_threads_are_limited() -> None:
    source = "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(99,)).start()\n"
    assert run_once(source, limits=ProgramLimits(seconds=20, n_processes=2)).end == "processes"


def test_iterator_may_be_closed_early(level: Level) -> None:
    with closing(run_program("import os; os.write(1, bytes(range(256)))", [Stdin()] * 50, SMALL, level)) as results:
        assert json.loads(json.dumps(next(results).stdout))[:3] == "\x00\x01\x02"  # output that is not text


def test_temporary_folder_may_be_closed_to_others(level: Level, no_traces: Path) -> None:
    no_traces.chmod(0o700)
    fill = "import time\nfor i in range(8): open(f'f{i}', 'wb').write(bytes(3 << 20))\ntime.sleep(9)"
    assert run_once(fill, limits=SMALL, level=level).end == ("exit" if level == "namespaces" else "disk")


# -- the setting `isolation`, on machines that support different levels

NO_NAMESPACES = {"namespace": "not here", "landlock": None}
NEITHER = {"namespace": "not here", "landlock": "nor here"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name, problem in request.param.items():
        monkeypatch.setattr(program, f"_{name}_problem", lambda problem=problem: problem)


@pytest.mark.parametrize(
    ("machine", "isolation", "level"),
    [
        ({"namespace": None}, "best", "namespaces"),
        ({"namespace": None}, "limits", "namespaces"),
        (NO_NAMESPACES, "best", "landlock"),
        (NO_NAMESPACES, "limits", "landlock"),
        (NEITHER, "limits", "limits"),
    ],
    indirect=["machine"],
)
def test_first_supported_level_is_taken(machine: None, isolation: Isolation, level: Level) -> None:
    assert level_for(isolation) == level


@pytest.mark.parametrize(
    ("machine", "isolation", "message"),
    [
        (NO_NAMESPACES, "namespaces", r"isolation=namespaces, but .*\(not here\).*isolation=best"),
        (NEITHER, "best", r"=best, but .*\(not here; nor here\).*skyrl_gym\.<env_class>\.isolation=limits"),
    ],
    indirect=["machine"],
)
def test_unsupported_level_is_refused(machine: None, isolation: Isolation, message: str) -> None:
    with pytest.raises(OSError, match=message):
        level_for(isolation)


@pytest.mark.parametrize("machine", [NEITHER], indirect=True)
def test_programs_do_not_run_by_default_where_nothing_keeps_them_apart(machine: None) -> None:
    with pytest.raises(OSError, match="isolation=best, but this machine"):
        run_once("")


def test_program_that_cannot_be_confined_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = program._describe_job
    broken = asdict(SMALL) | {"file_bytes": "not a number"}
    monkeypatch.setattr(program, "_describe_job", lambda *args: job(*args) | {"limits": broken})
    with pytest.raises(ToolFailure, match="a program could not be isolated"):
        run_once(f"open({str(tmp_path / 'ran')!r}, 'w')", level="limits")
    assert os.listdir(tmp_path) == []


def test_secrets_and_processes_are_out_of_reach(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    result = run_once(f"import os; print(dict(os.environ)); os.kill({os.getpid()}, 0)", limits=SMALL, level=level)
    assert "hunter2" not in result.stdout
    assert "ProcessLookupError" in result.stderr or "PermissionError" in result.stderr


def test_trainer_may_ignore_the_end_of_its_children(level: Level) -> None:
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_once("print(1)", level=level).stdout == "1\n"
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_system_v_ipc_of_other_processes_is_refused(level: Level) -> None:
    calls = ["shmat(-1, 0, 0)", "shmctl(-1, 0, 0)", "semop(-1, 0, 0)", "semtimedop(-1, 0, 0, 0)", "semctl(-1, 0, 0)"]
    calls += ["msgsnd(-1, b'x', 0, 0)", "msgrcv(-1, 0, 0, 0, 0)", "msgctl(-1, 0, 0)"]
    source = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
    source += "\n".join(f"libc.{call}; print(ctypes.get_errno())" for call in calls)
    assert set(run_once(source, level=level).stdout.split()) == {str(errno.EPERM)}


def test_no_descriptor_of_the_trainer_is_inherited(level: Level) -> None:
    source = "import os\nfor fd in range(4, 9000):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(9000, hard), hard))
    try:
        with ExitStack() as stack:
            for _ in range(min(4500, hard - 200)):
                stack.enter_context(open(os.devnull))
            assert run_once(source, level=level).stdout == ""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif("namespaces" not in LEVELS, reason="users cannot create namespaces on this machine")
class TestNamespaces:
    """Guarantees that only namespaces can give."""

    def test_files_outside_the_work_folder_cannot_be_opened(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("hunter2")
        visible = ["/usr", sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")]
        modes = {f"{folder}/harm": "w" for folder in visible} | {str(tmp_path / "secret"): "r"}
        for path in ("sys/kernel/core_pattern", "1/mem", "1/environ", "1/fd/3"):
            modes[f"/proc/{path}"] = "r+"
        attempts = [*modes.items(), *((f"{folder}/harm", mode) for folder in ("", "/dev", "/etc") for mode in "wr")]
        source = (
            f"for path, mode in {attempts}:\n    try: print('opened', path, open(path, mode))\n    except OSError: pass"
        )
        result = run_once(source, limits=SMALL)
        assert (result.status, result.stdout) == (0, ""), result.stderr

    def test_other_processes_are_invisible(self) -> None:
        result = run_once("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))", limits=SMALL)
        assert result.stdout == "2\n"  # the warden, and itself

    def test_privileged_calls_fail(self) -> None:
        calls = [
            "mount(b'none', b'/usr', None, 4096 | 32, None)",  # remount, writable
            "umount2(b'/usr', 2)",
            "unshare(0x10000000)",  # another user namespace
            "sethostname(b'x', 1)",
            "ptrace(16, 1, 0, 0)",  # attach to the warden
            "kill(1, 0) - 1 + libc.kill(1, 2)",  # the first process of a namespace ignores signals
            "shmget(0, 1 << 20, 0o1777)",
            "memfd_create(b'x', 0)",
            "chmod(b'/dev/null', 0o666)",
        ]
        source = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        source += "\n".join(f"print(libc.{call})" for call in calls)
        assert run_once(source, limits=SMALL).stdout.split() == ["-1"] * len(calls)


def test_machine_supports_what_it_claims() -> None:
    assert isolation_level() == LEVELS[0]


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"seconds": math.inf}, {"seconds": math.nan}, {"cpu_seconds": -1}])
def test_limits_must_be_positive_and_finite(limits: dict[str, float]) -> None:
    ((name, value),) = limits.items()
    with pytest.raises(ValueError, match=rf"the limit {name}={value} of a program must be a positive number"):
        ProgramLimits(**limits)  # type: ignore[arg-type]


def test_one_program_runs_per_core() -> None:
    results: list[ProgramResult] = []

    def work() -> None:
        results.append(run_once("import time; time.sleep(0.2); print(time.time())"))

    n = os.cpu_count() or 1
    threads = [threading.Thread(target=work) for _ in range(3 * n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = sorted(float(result.stdout) for result in results)
    assert all(later - earlier > 0.15 for earlier, later in zip(ends, ends[n:], strict=False))


def test_programs_end_when_the_trainer_is_killed(tmp_path: Path) -> None:
    code = (
        "from skyrl_gym.isolation.program import run_once, ProgramLimits\n"
        "run_once('import time; time.sleep(1000)', limits=ProgramLimits(seconds=1000))"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # its folder is left behind
    trainer = psutil.Popen([sys.executable, "-c", code], env=environment)
    wait_until(lambda: len(trainer.children(recursive=True)) >= 3)
    family = trainer.children(recursive=True)
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
