"""Well-behaved and hostile programs. The fixture `no_resources_leak` checks that neither leaves anything behind."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import resource
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from isolation.containment import supported_levels
from isolation.traces import Traces

from skyrl_gym.error import ToolFailure
from skyrl_gym.isolation import FunctionCall, Limits, ProgramResult, Stdin, isolation_level, program, run_program
from skyrl_gym.isolation.program import Isolation, Level, level_for, run_once

pytestmark = pytest.mark.usefixtures("frozen_objects")

SMALL = Limits(seconds=1.0, memory_bytes=256 << 20, output_bytes=100_000, file_bytes=4 << 20, disk_bytes=8 << 20)
LEVELS = supported_levels()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Level:
    level: Level = request.param
    return level


def count_resources() -> tuple[set[int], int, int]:
    """Return the children of this process, and the numbers of its descriptors and threads."""
    gc.collect()
    me = psutil.Process()
    return {child.pid for child in me.children(recursive=True)}, me.num_fds(), threading.active_count()


@pytest.fixture(autouse=True)
def no_resources_leak(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    traces = Traces()
    traces.record(monkeypatch)
    children, n_descriptors, n_threads = count_resources()
    yield
    children_after, n_descriptors_after, n_threads_after = count_resources()
    assert children_after <= children
    assert n_descriptors_after <= n_descriptors
    assert n_threads_after <= n_threads
    assert (traces.processes(), traces.folders()) == (set(), set())


# -- well-behaved programs


def test_stdin_stdout_and_stderr(level: Level) -> None:
    result = run_once("import sys\nprint(input()[::-1])\nprint('é', file=sys.stderr)", "abc\n", level=level)
    assert (result.end, result.status, result.stdout, result.stderr) == ("exit", 0, "cba\n", "é\n")
    assert result.is_success


def test_programs_may_open_stdin_by_name_and_read_their_own_name(level: Level) -> None:
    result = run_once("print(open('/dev/stdin').read()[::-1], __file__)", "cba", level=level)
    assert (result.status, result.stdout) == (0, "abc program.py\n"), result.stderr


def test_every_run_starts_a_fresh_process(level: Level) -> None:
    source = "import os\nprint(len(os.listdir('.')), input())\nopen('left', 'w').close()\nos.makedirs('a/b')"
    results = list(run_program(source, [Stdin(str(i)) for i in range(5)], SMALL, level))
    assert [result.stdout for result in results] == [f"0 {i}\n" for i in range(5)]


def test_function_and_method_calls(level: Level) -> None:
    source = "class Solution:\n    def add(self, a, b): return (a + b, {a})\ndef sub(a, b): return a - b"
    method, function, missing = run_program(
        source, [FunctionCall("add", [2, 3]), FunctionCall("sub", [2, 3]), FunctionCall("mul")], SMALL, level
    )
    assert (method.value, function.value) == ([5, [2]], -1)
    assert "KeyError: 'mul'" in missing.stderr
    assert not missing.is_success
    with pytest.raises(ValueError, match="Expecting value"):
        _ = missing.value


def test_called_program_is_not_main(level: Level) -> None:
    source = "def f(): return __name__\nif __name__ == '__main__': raise SystemExit(3)"
    assert [o.status for o in run_program(source, [FunctionCall("f"), Stdin()], SMALL, level)] == [0, 3]


@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, ""),
        ("import sys; sys.exit(2**80 + 3)", 3, ""),
        ("1 / 0", 1, 'File "program.py", line 1, in <module>'),
        ("def", 1, "SyntaxError"),
        ("print('\0')", 1, "null bytes"),
        ("print(chr(0xd800))", 0, ""),
        ("'\ud800'", 1, "surrogates not allowed"),
        ("import threading\nt = threading.Thread(target=lambda: print('late'))\nt.start()", 0, ""),
        ("if __name__ == '__main__': print(1)", 0, ""),
        ("print(1); exit()", 0, ""),
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
    limits = Limits(seconds=20.0, cpu_seconds=0.5)
    computes, waits, in_children = run_program(
        "import os, time\nkind = input()\n"
        "if kind == 'children' and os.fork(): os.wait()\n"
        "elif kind == 'wait': time.sleep(1)\n"
        "else:\n  while True: pass",
        [Stdin("compute"), Stdin("wait"), Stdin("children")],
        limits,
        level,
    )
    assert (computes.end, waits.end, in_children.end) == ("time", "exit", "time")
    assert 0.5 <= computes.cpu_seconds < 2
    assert waits.cpu_seconds < 0.5 < waits.seconds


class TestLevels:
    """The setting `isolation`, on machines that support different levels."""

    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        for name, problem in request.param.items():
            monkeypatch.setattr(program, f"_{name}_problem", lambda problem=problem: problem)

    @pytest.mark.parametrize(
        ("machine", "isolation", "level"),
        [
            ({"namespace": None}, "best", "namespaces"),
            ({"namespace": None}, "limits", "namespaces"),
            ({"namespace": "not here", "landlock": None}, "best", "landlock"),
            ({"namespace": "not here", "landlock": None}, "limits", "landlock"),
            ({"namespace": "not here", "landlock": "nor here"}, "limits", "limits"),
        ],
        indirect=["machine"],
    )
    def test_first_supported_level_is_taken(self, machine: None, isolation: Isolation, level: Level) -> None:
        assert level_for(isolation) == level

    @pytest.mark.parametrize(
        ("machine", "isolation", "message"),
        [
            ({"namespace": "not here"}, "namespaces", r"isolation=namespaces, but .*\(not here\).*isolation=best"),
            (
                {"namespace": "not here", "landlock": "nor here"},
                "best",
                r"isolation=best, but .*\(not here; nor here\).*environment\.skyrl_gym\.<env_class>\.isolation=limits",
            ),
        ],
        indirect=["machine"],
    )
    def test_unsupported_level_is_refused(self, machine: None, isolation: Isolation, message: str) -> None:
        with pytest.raises(OSError, match=message):
            level_for(isolation)

    @pytest.mark.parametrize("machine", [{"namespace": "not here", "landlock": "nor here"}], indirect=True)
    def test_programs_do_not_run_by_default_where_nothing_keeps_them_apart(self, machine: None) -> None:
        with pytest.raises(OSError, match="isolation=best, but this machine"):
            run_once("")

    def test_machine_supports_what_it_claims(self) -> None:
        assert isolation_level() == LEVELS[0]

    def test_program_that_cannot_be_confined_is_not_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        job = program._job
        broken = asdict(SMALL) | {"file_bytes": "not a number"}
        monkeypatch.setattr(program, "_job", lambda *args: job(*args) | {"limits": broken})
        with pytest.raises(ToolFailure, match="a program could not be isolated"):
            run_once(f"open({str(tmp_path / 'ran')!r}, 'w')", level="limits")
        assert os.listdir(tmp_path) == []


def test_program_waits_for_its_threads(level: Level) -> None:
    source = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()"
    assert run_once(source, level=level).stdout == "late\n"


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("import atexit\natexit.register(print, 'late')", "late\n"),
        ("import sys\nsys.__stdout__.write('plain')", "plain"),
        (
            "import io, os, sys, atexit\nsys.stdout = out = io.StringIO()\n"
            "@atexit.register\ndef write(): sys.__stdout__.write(out.getvalue())\nprint('fast')",
            "fast\n",
        ),
    ],
)
def test_output_of_exit_handlers(source: str, printed: str, level: Level) -> None:
    assert run_once(source, level=level).stdout == printed


def test_called_program_is_a_regular_module(level: Level) -> None:
    source = (
        "import pickle\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: int = 0\n"
        "def f(n: int): return [pickle.loads(pickle.dumps(Point(n))).x, f.__annotations__['n'] is int]"
    )
    (result,) = run_program(source, [FunctionCall("f", [3])], SMALL, level)
    assert result.value == [3, True]


def test_threads_are_limited() -> None:
    source = "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(99,)).start()\n"
    result = run_once(source, limits=Limits(seconds=20, n_processes=2))
    assert result.end == "processes"


def test_iterator_may_be_closed_early(level: Level) -> None:
    with closing(run_program("print(1)", [Stdin()] * 50, SMALL, level)) as results:
        assert next(results).stdout == "1\n"


def test_megabyte_of_input_and_output(level: Level) -> None:
    text = "é\n" * 250_000
    result = run_once("import sys; sys.stdout.write(sys.stdin.read())", text, Limits(output_bytes=1 << 20), level)
    assert (result.end, result.stdout) == ("exit", text)


# -- programs that look around; `test_attacks.py` has the hostile ones


def test_signals_reach_no_other_process(level: Level) -> None:
    result = run_once(f"import os; os.kill({os.getpid()}, 0)", limits=SMALL, level=level)
    assert "ProcessLookupError" in result.stderr or "PermissionError" in result.stderr


def test_failed_run_does_not_end_the_others(level: Level) -> None:
    source = "n = int(input())\nif n == 1:\n    while True: pass\nprint(n)"
    results = list(run_program(source, [Stdin("0"), Stdin("1"), Stdin("2")], SMALL, level))
    assert [(o.end, o.stdout) for o in results] == [("exit", "0\n"), ("time", ""), ("exit", "2\n")]


def test_environment_variables_are_hidden(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    assert "hunter2" not in run_once("import os; print(dict(os.environ))", level=level).stdout


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

    def test_no_network(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            result = run_once(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)", limits=SMALL)
        assert "PermissionError" in result.stderr

    def test_files_of_the_user_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("hunter2")
        result = run_once(f"print(open({str(tmp_path / 'secret')!r}).read())", limits=SMALL)
        assert "FileNotFoundError" in result.stderr

    @pytest.mark.parametrize("folder", ["/usr", sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")])
    def test_visible_folders_are_read_only(self, folder: str) -> None:
        result = run_once(f"open({folder + '/harm'!r}, 'w')", limits=SMALL)
        assert "Read-only file system" in result.stderr or "Permission denied" in result.stderr

    @pytest.mark.parametrize(
        "path",
        [
            "/proc/sys/kernel/core_pattern",
            "/proc/1/mem",
            "/proc/1/environ",
            "/proc/1/fd/3",
            "/harm",
            "/dev/harm",
            "/etc/harm",
        ],
    )
    def test_files_outside_the_work_folder_cannot_be_opened_for_writing(self, path: str) -> None:
        result = run_once(f"open({path!r}, 'r+')", limits=SMALL)
        assert result.stderr.rstrip().splitlines()[-1].startswith(("PermissionError", "FileNotFoundError"))
        result = run_once(f"open({path!r}, 'w')", limits=SMALL)
        assert result.status == 1

    def test_other_processes_are_invisible(self) -> None:
        result = run_once("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))", limits=SMALL)
        assert result.stdout == "2\n"  # the warden, and itself

    @pytest.mark.parametrize(
        "what",
        [
            "libc.mount(b'none', b'/usr', None, 4096 | 32, None)",  # remount, writable
            "libc.umount2(b'/usr', 2)",
            "libc.unshare(0x10000000)",  # another user namespace
            "libc.sethostname(b'x', 1)",
            "libc.ptrace(16, 1, 0, 0)",  # attach to the warden
            "libc.kill(1, 0) - 1 + libc.kill(1, 2)",  # the first process of a namespace ignores signals
            "libc.shmget(0, 1 << 20, 0o1777)",
            "libc.memfd_create(b'x', 0)",
            "libc.chmod(b'/dev/null', 0o666)",
        ],
    )
    def test_privileged_calls_fail(self, what: str) -> None:
        result = run_once(f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print({what})", limits=SMALL)
        assert result.stdout == "-1\n"


# -- limits themselves


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"seconds": math.inf}, {"seconds": math.nan}, {"cpu_seconds": -1}])
def test_limits_must_be_positive_and_finite(limits: dict[str, float]) -> None:
    ((name, value),) = limits.items()
    with pytest.raises(ValueError, match=rf"the limit {name}={value} of a program must be a positive number"):
        Limits(**limits)  # type: ignore[arg-type]


def test_one_program_runs_per_core() -> None:
    results: list[ProgramResult] = []

    def work() -> None:
        results.append(run_once("import time; time.sleep(0.2); print(time.time())"))

    threads = [threading.Thread(target=work) for _ in range(3 * (os.cpu_count() or 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = sorted(float(result.stdout) for result in results)
    n = os.cpu_count() or 1
    assert all(later - earlier > 0.15 for earlier, later in zip(ends, ends[n:], strict=False))


def test_programs_end_when_the_trainer_is_killed(tmp_path: Path) -> None:
    code = (
        "from skyrl_gym.isolation.program import run_once, Limits\n"
        "run_once('import time; time.sleep(1000)', limits=Limits(seconds=1000))"
    )
    trainer = psutil.Popen(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}
    )  # its folder is left behind
    deadline = time.monotonic() + 60
    while len(family := trainer.children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert family
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_temporary_folder_may_be_closed_to_others(
    level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = "import os, tempfile\nwith tempfile.TemporaryFile() as file: print(file.write(b'text'), os.listdir('.'))"
    assert run_once(source, level=level).stdout == "4 []\n"
    fill = "import time\nfor i in range(8): open(f'f{i}', 'wb').write(bytes(3 << 20))\ntime.sleep(9)"
    assert run_once(fill, limits=SMALL, level=level).end == ("exit" if level == "namespaces" else "disk")


def test_output_that_is_not_text_can_be_written_as_json(level: Level) -> None:
    result = run_once("import os; os.write(1, bytes(range(256)))", level=level)
    assert json.loads(json.dumps(result.stdout))[:3] == "\x00\x01\x02"
