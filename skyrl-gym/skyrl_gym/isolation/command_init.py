"""The process that isolates a command and runs it. `command.py` starts it as a script. Startup time matters."""

import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from skyrl_gym.isolation.files import TOO_MANY_BYTES, file_bytes, unnamed_bytes
from skyrl_gym.isolation.kernel import PR_SET_DUMPABLE, prctl, set_limit
from skyrl_gym.isolation.namespaces import enter_namespaces, isolate_folders, outermost, run_as_init
from skyrl_gym.isolation.processes import all_processes, memory_bytes, n_threads
from skyrl_gym.isolation.relay import start_relay

PORT = 8000
"""The port inside, on 127.0.0.1, that leads to the Unix socket."""
SOCKET = "/run/model.sock"
NOT_ISOLATED = 254
"""Exit status if the command could not be isolated, so it never ran."""
KILLED = 128 + signal.SIGKILL
WATCH_SECONDS = 0.1
SCAN_SECONDS = 1.0  # between scans of files, at least
SCAN_SHARE = 0.05  # of the time, for scans of many files
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

Json = Mapping[str, Any]
"""The fields of an `Isolation`, and `argv`."""


def main() -> None:
    """Read the job from standard input and run its command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who ends this process in order
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        job = json.load(sys.stdin.buffer)
        enter_namespaces()
    except (OSError, ValueError) as error:
        _refuse(error)
    run_as_init(lambda: _run(job))


def _run(job: Json) -> NoReturn:
    """Isolate this process, the first of its namespace, then run the command as its child. Reap all descendants."""
    writable = dict(job["writable"])
    try:
        if job["socket"] is not None:
            _bring_up_loopback()
            writable[SOCKET] = job["socket"]
        isolate_folders(job["root"], job["readable"], writable, job["files"], job["cwd"])
        prctl(PR_SET_DUMPABLE, 0)  # protects this process's memory, which holds the job
    except OSError as error:
        _refuse(error)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    child = os.fork()
    if child == 0:
        _exec(job)
    if job["socket"] is not None:
        start_relay(SOCKET, PORT)
    threading.Thread(target=_watch, args=(job,), daemon=True).start()
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _exec(job: Json) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.setsid()
        prctl(PR_SET_DUMPABLE, 1)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # the kernel kills it first
        set_limit(resource.RLIMIT_CORE, 0, is_final=True)
        set_limit(resource.RLIMIT_FSIZE, job["file_bytes"], is_final=True)
        os.execvpe(job["argv"][0], job["argv"], job["env"])
    except OSError as error:
        os.write(2, f"{job['argv'][0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _watch(job: Json) -> NoReturn:
    """End the namespace if its processes or its files exceed a limit."""
    next_scan = unnamed = 0.0
    while True:
        time.sleep(WATCH_SECONDS)
        processes = [pid for pid in all_processes() if pid != 1]
        if (started := time.monotonic()) >= next_scan:
            unnamed = unnamed_bytes(processes)
            _check_files(job)
            ended = time.monotonic()
            next_scan = ended + max(SCAN_SECONDS, (ended - started) / SCAN_SHARE)
        if sum(map(n_threads, processes)) > job["n_threads"]:
            _kill(f"more than {job['n_threads']} processes and threads")
        if sum(map(memory_bytes, processes)) + unnamed > job["memory_bytes"]:
            _kill(f"more than {job['memory_bytes'] >> 20} MiB of memory")


def _check_files(job: Json) -> None:
    """End the namespace if its files exceed a limit, or cannot be counted."""
    folders = list(outermost(path for path in job["writable"] if os.path.isdir(path)))
    sizes = [file_bytes(folder, (), job["n_files"], job["readable"]) for folder in folders]
    if max(sizes, default=0) == TOO_MANY_BYTES:
        _kill(f"more than {job['n_files']:,} files, or a folder that cannot be listed")
    if sum(sizes) > job["total_bytes"]:
        _kill(f"more than {job['total_bytes'] >> 20:,} MiB of files")


def _kill(reason: str) -> NoReturn:
    os.write(2, f"\nkilled: {reason}\n".encode())
    os._exit(KILLED)


def _refuse(error: Exception) -> NoReturn:
    os.write(2, f"cannot isolate the command: {error}\n".encode())
    os._exit(NOT_ISOLATED)


def _bring_up_loopback() -> None:
    """Enable the address 127.0.0.1 in this process's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
