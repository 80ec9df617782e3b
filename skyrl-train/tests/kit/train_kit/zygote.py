"""A process that has imported PyTorch and forks Python programs: a run starts in 0.1 s instead of 6 s.

Most tests that need a separate process care about what the process does, not about how Python starts. They use a
*shim* in place of `sys.executable`:

    pytest worker ── Popen ──> shim ── socket: arguments, environment, descriptors ──> zygote ── fork ──> program

The shim starts in 20 ms, takes the arguments of Python (`-m module`, `-c code`, a script) and behaves like the program:
it hands over its open descriptors, forwards signals, and ends with the program's exit status. Shell scripts find it on
their PATH, torchrun in PYTHON_EXEC, and multiprocessing as its executable. Arguments that only a new interpreter can
honor (`-I`, `-X …`) make the shim start one.

How they end:
- The program ends, then its shim: with the same status, or by the same signal.
- The shim is killed: its connection closes, and the zygote kills the program.
- The pytest worker ends: the zygote's standard input closes, and it kills all programs.

A program differs from a real one in three ways: it is a child of the zygote, the modules of `PRELOADED` are in
`sys.modules` from the start, and it ends without freeing its memory object by object. Tests of start-up itself (lazy
imports, process trees) start a real Python, and so do all tests with TEST_REAL_PYTHON=1, as every night.
"""

import array
import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "skyrl_train.entrypoints.experiment",
    "skyrl_train.entrypoints.main_sft",
    "skyrl_report.page",
    "datasets",
    "matplotlib.backends.backend_agg",
    "pandas",
    "peft",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "torch.distributed.run",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)
MAX_DESCRIPTORS = 250  # the kernel passes at most 253 with one message
IGNORED_FLAGS = {"-u", "-s", "-B", "-P"}

SHIM = f"""#!{sys.executable} -ISs
import array, json, os, signal, socket, sys

flags = sys.argv[1:]
while flags and flags[0] in {IGNORED_FLAGS!r}:
    flags.pop(0)
if not flags or flags[0].startswith("-") and flags[0] not in ("-m", "-c"):
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])

connection = socket.socket(socket.AF_UNIX)
connection.connect("ADDRESS")
descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
descriptors = [n for n in descriptors if os.path.exists(f"/proc/self/fd/{{n}}") and (n <= 2 or os.get_inheritable(n))]
leads_session = os.getsid(0) == os.getpid()
request = json.dumps([flags, os.getcwd(), dict(os.environ), descriptors, leads_session]).encode()
passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
connection.sendmsg([len(request).to_bytes(8, "big")], passed)
connection.sendall(request)
replies = connection.makefile("r")
pid = int(replies.readline())

def forward(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, forward)
for number in descriptors:
    os.close(number)
status = int(replies.readline())
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class Zygote:
    """A zygote that lives as long as this process, and the shim that starts programs through it."""

    def __init__(self, folder: Path, preloaded: tuple[str, ...] = PRELOADED) -> None:
        address = f"\0skyrl-zygote-{os.getpid()}-{folder}"[:100]  # in the abstract namespace: no file to remove
        self._address = address
        self.python = folder / "python"
        """The shim; use it like `sys.executable`."""
        self.python.write_text(SHIM.replace("ADDRESS", address.replace("\0", "\\0")))
        self.python.chmod(0o755)
        command = [sys.executable, "-P", __file__, address[1:], *preloaded]  # -P: modules here are named as others are
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, **pipes)
        assert self._process.stdout.readline() == b"ready\n", "the zygote did not start; its messages are above"

    def serve_multiprocessing(self) -> None:
        """Start the processes of `multiprocessing` in this process through the zygote."""
        resource_tracker.ensure_running()  # a real one, since it ends after the zygote
        multiprocessing.set_executable(str(self.python))

    def preload(self, module: str) -> None:
        """Import another module in the zygote, for the programs that start after it."""
        request = json.dumps([["--import", module], "", {}, [], False]).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            connection.sendall(len(request).to_bytes(8, "big") + request)
            assert connection.recv(1), f"the zygote could not import {module}; its messages are above"

    @property
    def pid(self) -> int:
        """The process id of the zygote, whose children are the programs."""
        return self._process.pid

    def close(self) -> None:
        """Kill all programs, and end the zygote."""
        self._process.communicate(timeout=30)


@dataclass(frozen=True)
class _Program:
    """A request of a shim, in the forked process."""

    arguments: list[str]
    cwd: str
    environment: dict[str, str]
    descriptors: dict[int, int]
    """The zygote's descriptor for each descriptor of the program."""
    leads_session: bool

    def become(self) -> NoReturn:
        """Turn this process into the program, and end it."""
        status: object = 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` may have started the tests
        try:
            self._run()
        except SystemExit as end:
            status = end.code
        except KeyboardInterrupt:
            traceback.print_exc()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:  # noqa: BLE001, as the interpreter does
            traceback.print_exc()
            status = 1
        if not isinstance(status, int | None):
            sys.stderr.write(f"{status}\n")
            status = 1
        threading._shutdown()  # joins threads, as the end of the interpreter does
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed by the program, or nobody reads
                stream.flush()
        os._exit(int(status or 0) & 0xFF)

    def _run(self) -> None:
        if self.leads_session:
            os.setsid()
        # Copies above all targets, so that no target overwrites a descriptor that is still needed.
        above = {target: fcntl.fcntl(source, fcntl.F_DUPFD, 1000) for target, source in self.descriptors.items()}
        os.closerange(3, 1000)
        for target, source in above.items():
            os.dup2(source, target)
            os.close(source)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environment)
        self._reseed()
        option, *argv = self.arguments
        name = argv.pop(0) if option in ("-m", "-c") else option
        first = {"-m": self.cwd, "-c": ""}.get(option, str(Path(name).resolve().parent))
        others = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = list(dict.fromkeys([first, *filter(None, others), *sys.path[1:]]))
        sys.orig_argv = [sys.executable, *self.arguments]
        sys.argv = ["-c" if option == "-c" else name, *argv]
        if option == "-m":
            sys.modules.pop(name, None)
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif option == "-c":
            main = sys.modules["__main__"] = type(sys)("__main__")
            exec(compile(name, "<string>", "exec"), main.__dict__)
        else:
            runpy.run_path(name, run_name="__main__")

    def _reseed(self) -> None:
        """Draw other random numbers than the zygote's other programs, and use the program's number of threads."""
        random.seed()
        multiprocessing.current_process().authkey = os.urandom(32)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        n_threads = self.environment.get("OMP_NUM_THREADS")
        if (torch := sys.modules.get("torch")) and n_threads:
            torch.set_num_threads(int(n_threads))


class _Server:
    """The loop of the zygote: it forks programs, and sends their exit status to their shims."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._shims: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._ended, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)

    def serve(self) -> _Program:
        """Fork a program for each shim; return in the forked processes only."""
        self._watch(self._listener, self._fork)
        self._watch(self._ended, self._report_ends)
        self._watch(0, self._end)
        while True:
            for key, _ in self._selector.select():
                if program := key.data():
                    return program

    def _watch(self, source: Any, action: Callable[[], _Program | None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, action)

    def _fork(self) -> _Program | None:
        shim, _ = self._listener.accept()
        received = array.array("i")
        size, ancillary, _, _ = shim.recvmsg(8, socket.CMSG_SPACE(MAX_DESCRIPTORS * received.itemsize))
        for _, _, payload in ancillary:
            received.frombytes(payload)
        with shim.makefile("rb") as reader:
            arguments, cwd, environment, targets, leads_session = json.loads(reader.read(int.from_bytes(size, "big")))
        if arguments[0] == "--import":
            importlib.import_module(arguments[1])
            gc.freeze()
            shim.sendall(b"1")
            shim.close()
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for connection in (self._listener, self._ended, shim, *self._shims.values()):
                connection.close()
            return _Program(arguments, cwd, environment, dict(zip(targets, received, strict=True)), leads_session)
        for descriptor in received:
            os.close(descriptor)
        self._shims[pid] = shim
        self._watch(shim, lambda: self._kill(pid))
        shim.sendall(f"{pid}\n".encode())
        return None

    def _kill(self, pid: int) -> None:
        """Kill a program whose shim is gone."""
        self._selector.unregister(self._shims[pid])
        os.kill(pid, signal.SIGKILL)

    def _report_ends(self) -> None:
        self._ended.recv(4096)
        while self._shims:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            shim = self._shims.pop(pid)
            with suppress(KeyError):  # `_kill` was first
                self._selector.unregister(shim)
            with suppress(OSError), shim:
                shim.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _end(self) -> None:
        for pid in self._shims:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def main() -> None:
    address, *preloaded = sys.argv[1:]
    for module in preloaded:
        importlib.import_module(module)
    if conversions := sys.modules.get("transformers.conversion_mapping"):
        conversions.get_checkpoint_conversion_mapping("qwen3")  # compiles 700 regular expressions, which takes 0.5 s
    gc.collect()
    gc.freeze()  # programs need not visit, and thereby copy, the memory that they share
    server = _Server(f"\0{address}")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.serve().become()


if __name__ == "__main__":
    main()
