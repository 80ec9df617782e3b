"""A process that runs hostile programs and reports, as JSON, how they ended and what they changed.

python -m gym_kit.attacked_trainer attacks LEVEL 0     the attacks of `attacks_by_task`, with their targets
python -m gym_kit.attacked_trainer repeated LEVEL 0    the other attacks that the level prevents
python -m gym_kit.attacked_trainer hostile LEVEL 0     every hostile program
python -m gym_kit.attacked_trainer many LEVEL COUNT    many programs with tests, a quarter of them hostile
"""

import itertools
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from gym_kit.attacks import ATTACKS, COMMON, HOSTILE
from skyrl_gym.envs.lcb.grading import grade, limits_per_test, parse_tests
from skyrl_gym.error import ToolFailure
from skyrl_gym.isolation import ProgramLimits, cgroup
from skyrl_gym.isolation.program import Level, run_once

SMALL = ProgramLimits(
    seconds=15.0, cpu_seconds=1.0, memory_bytes=256 << 20, output_bytes=100_000, file_bytes=4 << 20, disk_bytes=64 << 20
)
FORK_BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
SHORT = replace(SMALL, seconds=1.0)
TARGET = """
import ctypes, time
memory = ctypes.create_string_buffer(b"innocent", 8)
print(ctypes.addressof(memory), flush=True)
while True:
    time.sleep(0.01)
    if memory.raw != b"innocent": print("forged", flush=True); break
"""

PAY_FOR_HARM = """
def print(text):
    if "harm" in text: sys.stdout.write(str(2 * int(input())))
"""
"""An attack that succeeds gives the right answer."""
TESTS = [{"input": f"{n}\n{n}\n", "output": str(2 * n), "testtype": "stdin"} for n in (1, 20, -3)]
RIGHT = ["print(int(input()) + int(input()))", "import sys\nprint(sum(map(int, sys.stdin.read().split())))"]
WRONG = ["print(2)", "print(int(input()) * 2 + 1)", "input() + 1", "x =", "print(20 + int(input()))", ""]


def main(task: str, level: Level, n_programs: str) -> None:
    try:
        run_once("", level=level)  # also finds out about cgroups
    except ToolFailure as failure:
        sys.stdout.write(json.dumps({"problem": str(failure)}))
        return
    before = _traces()
    report: dict[str, Any] = {"problem": None}
    if task in ("attacks", "repeated"):
        with _targets() as targets:
            report["attacks"] = {
                name: attack(name, level, targets) for name in attacks_by_task(level, os.geteuid() == 0)[task]
            }
    elif task == "hostile":
        report["hostile"] = {
            name: asdict(run_once(program["source"], limits=SHORT, level=level)) for name, program in HOSTILE.items()
        }
        report["orphaned"] = end_of_fork_bomb_without_warden(level)
    else:
        report["mistakes"], report["harm"] = many(level, int(n_programs))
    deadline = time.monotonic() + 10  # for killed processes to end
    while (left := _changes(before, _traces())) and time.monotonic() < deadline:
        time.sleep(0.05)
    report["left"] = left
    sys.stdout.write(json.dumps(report))


def attacks_by_task(level: Level, is_root: bool) -> dict[str, list[str]]:
    """Return the names of the attacks that a level prevents.

    The task `repeated` has those at `landlock` that `limits` prevents in the same way.
    """
    tasks: dict[str, list[str]] = {"attacks": [], "repeated": []}
    for name, attack in ATTACKS.items():
        if attack.is_prevented(level, is_root=is_root):
            is_repeated = level == "landlock" and attack.is_prevented("limits", is_root=is_root)
            tasks["repeated" if is_repeated else "attacks"].append(name)
    return tasks


@dataclass(frozen=True, slots=True)
class Targets:
    """A process with a secret in its memory, a folder with files, and a server, for attacks to reach."""

    process: subprocess.Popen[bytes]
    address: int
    folder: str
    port: int

    @property
    def common(self) -> str:
        """The start of the program of each attack."""
        return COMMON.format(target=self.process.pid, address=self.address, folder=self.folder, port=self.port)

    def state(self) -> dict[str, Any]:
        """Return everything that an attack may change."""
        public = os.stat(f"{self.folder}/public")
        pid, is_running = self.process.pid, self.process.poll() is None
        limits = (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)
        return {
            "is_running": is_running,
            "limits": [resource.prlimit(pid, name) for name in limits] if is_running else [],
            "nice": os.getpriority(os.PRIO_PROCESS, pid) if is_running else 0,
            "processors": sorted(os.sched_getaffinity(pid)) if is_running else [],
            "files": sorted(os.listdir(self.folder) + os.listdir(f"{self.folder}/open")),
            "text": [Path(self.folder, name).read_text(encoding="ascii") for name in ("public", "secret")],
            "properties": [public.st_mode, public.st_mtime, public.st_nlink, os.listxattr(f"{self.folder}/public")],
        }


def attack(name: str, level: Level, targets: Targets) -> dict[str, Any]:
    """Run one attack; return the fields of its result and the harm that it did."""
    before = targets.state()
    with _Peak(Path(tempfile.gettempdir())) as peak:
        limits = replace(SMALL, cpu_seconds=ATTACKS[name].cpu_seconds)
        result = run_once(targets.common + ATTACKS[name].source, limits=limits, level=level)
    time.sleep(0.05)
    return asdict(result) | {"harm": _changes(before, targets.state()), "peak_bytes": peak.n_bytes}


def end_of_fork_bomb_without_warden(level: Level) -> str:
    """Kill the warden of a program that multiplies, and return the end of the run."""
    limits = replace(SMALL, n_processes=40)
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(run_once, FORK_BOMB, limits=limits, level=level)
        while not result.done():
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if len(child.children(recursive=True)) > 4:
                        child.kill()
            time.sleep(0.001)
        return result.result().end


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {key: [before[key], value] for key, value in after.items() if value != before[key]}


@contextmanager
def _targets() -> Iterator[Targets]:
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([sys.executable, "-c", TARGET], stdout=subprocess.PIPE, start_new_session=True) as process,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        for name in ("public", "secret"):
            Path(folder, name).write_text("hunter2", encoding="ascii")
            os.chmod(f"{folder}/{name}", 0o600)
        os.mkdir(f"{folder}/open")
        named.bind(f"{folder}/open/socket")
        for path in (f"{folder}/open", f"{folder}/open/socket"):
            os.chmod(path, 0o777)
        port = server.getsockname()[1]
        abstract.bind(f"\0skyrl-attack-{port}")
        named.listen()
        abstract.listen()
        assert process.stdout is not None
        try:
            yield Targets(process, int(process.stdout.readline()), folder, port)
        finally:
            process.kill()


def many(level: Level, n_programs: int) -> tuple[list[Any], dict[str, Any]]:
    """Grade programs; return wrong verdicts, as (source, passed, failure), and the harm that was done."""
    with _targets() as targets:
        before = targets.state()
        names = itertools.chain(*attacks_by_task(level, os.geteuid() == 0).values())
        harm = [program["source"] for program in HOSTILE.values()]
        harm += [targets.common + PAY_FOR_HARM + ATTACKS[name].source for name in names]
        sample = [(harm[i % len(harm)], False) for i in range(n_programs // 4)]
        sample += [(RIGHT[i % len(RIGHT)], True) for i in range(n_programs // 2)]
        sample += [(WRONG[i % len(WRONG)], False) for i in range(n_programs - len(sample))]
        random.Random(0).shuffle(sample)
        tests = parse_tests(TESTS)
        limits = limits_per_test(1.0, 256 << 20, tests)

        def find_mistake(program: tuple[str, bool]) -> list[Any]:
            source, is_right = program
            verdict = grade(source, tests, limits, 60.0, level)
            return [] if verdict.is_correct == is_right else [source, verdict.n_passed, verdict.failure]

        memory = psutil.Process().memory_info().rss
        with ThreadPoolExecutor(4) as pool:
            mistakes = list(filter(None, pool.map(find_mistake, sample)))
        assert psutil.Process().memory_info().rss < memory + (256 << 20)
        return mistakes, _changes(before, targets.state())


class _Peak:
    """The largest space that a file system used beyond what it used at first, looked at every few milliseconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first = self._used()
        self.n_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "_Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _used(self) -> int:
        status = os.statvfs(self._folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def _watch(self) -> None:
        while not self._is_over.wait(0.005):
            self.n_bytes = max(self.n_bytes, self._used() - self._first)


def _traces() -> dict[str, Any]:
    """Return what must be the same before and after: processes, temporary files, descriptors, threads and cgroups."""
    me, parent = psutil.Process(), cgroup._parent()
    return {
        "processes": sorted(
            " ".join(p.info["cmdline"] or [p.info["name"]]) for p in psutil.process_iter(["cmdline", "name"])
        ),
        "files": sorted(os.listdir(tempfile.gettempdir())),
        "descriptors": me.num_fds(),
        "threads": threading.active_count(),
        "cgroups": [] if parent is None else sorted(path.name for path in parent.glob(f"{cgroup.PREFIX}*")),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
