"""Attacks on the process that runs a program: its secrets, its memory, its limits and its machine.

Each program prints `harm` or the secret if it succeeds in a way that it can see. The targets are a process that exists
only for the attack, so that an attack that succeeds harms nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyrl_gym.isolation.program import Level

COMMON = """
import ctypes, fcntl, glob, mmap, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
TARGET, ADDRESS, FOLDER, PORT = {target}, {address}, {folder!r}, {port}
def attempt(function, *args):
    try: return function(*args)
    except (OSError, ValueError): return None
def read(path):
    with open(path, "rb") as file: return file.read()
def leave(function, *args):
    if os.fork() == 0:
        if os.fork() == 0: function(*args)
        os._exit(0)
    os.wait()
"""

SHARED_MEMORY = """
def hold():
    memory, size = mmap.mmap({fd}, 128 << 20), 4 << 20
    for start in range(0, len(memory), size):
        memory[start : start + size : 4096] = bytes(size // 4096)
        memory.madvise(mmap.MADV_DONTNEED, start, size)  # the pages stay, but no process counts them
    os.write(w, b"x"); time.sleep(99)
r, w = os.pipe()
for i in range(6):
    if os.fork() == 0: attempt(hold); os._exit(1)
os.close(w)
if sum(len(os.read(r, 1)) for i in range(6)) == 6: print("harm")
"""

Need = Literal["", "user", "files"]


@dataclass(frozen=True, slots=True)
class Attack:
    """A program, and the allowed ends of its run.

    `needs`: what prevents it besides limits and the filter of calls: a user of its own, or no access to files.
    """

    source: str
    needs: Need = ""
    ends: str = "exit"
    cpu_seconds: float = 1.0
    """Limit of the run."""

    def is_prevented(self, level: Level, *, is_root: bool) -> bool:
        """Return True if this level claims to prevent the attack on a process of root or of a user."""
        return level != "limits" or self.needs == "" or (self.needs == "user" and is_root)


ATTACKS: dict[str, Attack] = {
    "environment of every process": Attack(
        "hidden = [f'/proc/{pid}/environ' for pid in (TARGET, os.getppid())]\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + hidden:\n"
        "    if (text := attempt(read, path)) and b'hunter2' in text: print('harm')",
        "user",
    ),
    "memory of another process, read": Attack(
        "def peek(pid):\n"
        "    with open(f'/proc/{pid}/mem', 'rb') as file: file.seek(ADDRESS); return file.read(8)\n"
        "if attempt(peek, TARGET): print('harm')\n"
        "local, remote = (ctypes.c_char * 8)(), 0\n"
        "vector = struct.pack('PN', ctypes.addressof(local), 8), struct.pack('PN', ADDRESS, 8)\n"
        "if libc.process_vm_readv(TARGET, vector[0], 1, vector[1], 1, 0) > 0: print('harm')",
        "user",
    ),
    "memory of another process, written": Attack(
        "def poke(pid):\n"
        "    with open(f'/proc/{pid}/mem', 'r+b', buffering=0) as file: file.seek(ADDRESS); file.write(b'forged!!')\n"
        "attempt(poke, TARGET)\n"
        "local = ctypes.create_string_buffer(b'forged!!', 8)\n"
        "libc.process_vm_writev(TARGET, struct.pack('PN', ctypes.addressof(local), 8), 1, "
        "struct.pack('PN', ADDRESS, 8), 1, 0)\n"
        "libc.ptrace(16, TARGET, 0, 0)",
        "user",
    ),
    "limits of other processes": Attack(
        "for pid in (TARGET, os.getppid()):\n"
        "    for name in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):\n"
        "        if attempt(resource.prlimit, pid, name): print('harm: read')\n"
        "        if attempt(resource.prlimit, pid, name, (1, 1)) is not None: print('harm')"
    ),
    "signals by owner of a descriptor": Attack(
        "pairs = [os.pipe(), attempt(os.openpty)]\n"
        "for pid in (TARGET, os.getppid(), -TARGET):\n"
        "    for fds in filter(None, pairs):\n"
        "        r, w = fds\n"
        "        attempt(fcntl.fcntl, r, 10, signal.SIGKILL)\n"
        "        for command, value in ((8, pid), (15, struct.pack('ii', 1, pid))):\n"
        "            if attempt(fcntl.fcntl, r, command, value) is not None: print('harm')\n"
        "        for request in (0x8901, 0x8902): attempt(fcntl.ioctl, r, request, struct.pack('i', pid))\n"
        "        attempt(fcntl.fcntl, r, fcntl.F_SETFL, os.O_ASYNC)\n"
        "        os.write(w, b'x')"
    ),
    "signals by every call": Attack(
        "info = ctypes.create_string_buffer(struct.pack('iii', 9, 0, -1), 128)\n"
        "for pid in (TARGET, os.getppid()):\n"
        "    attempt(os.kill, pid, 9); attempt(os.killpg, pid, 9)\n"
        "    for number, args in ((200 if X86 else 130, (pid, 9)), (234 if X86 else 131, (pid, pid, 9)),\n"
        "                         (129 if X86 else 138, (pid, 9, info)), (297 if X86 else 240, (pid, pid, 9, info))):\n"
        "        libc.syscall(number, *args)\n"
        "    fd = libc.syscall(434, pid, 0)\n"
        "    if fd >= 0: libc.syscall(424, fd, 9, None, 0)\n"
        "print('alive')"
    ),
    "signal at the end of a child": Attack(
        "libc.syscall(56 if X86 else 220, 0x8000 | 9, 0, 0, 0, 0) or os._exit(0)\n"  # CLONE_PARENT, SIGKILL
        "time.sleep(0.2)"
    ),
    "priority and processors of other processes": Attack(
        "for pid in (TARGET, os.getppid()):\n"
        "    attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)\n"
        "    attempt(os.sched_setaffinity, pid, {0})\n"
        "    attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))"
    ),
    "survivor without a mark": Attack(
        "def hide():\n"
        "    attempt(os.setsid)\n"
        "    if os.fork(): os._exit(0)\n"
        "    attempt(os.setpgid, 0, 0)\n"
        "    os.execve('/bin/sleep', ['sleep', '1000'], {})\n"
        "leave(hide)\n"
        "for name in (9, 15): attempt(os.kill, os.getppid(), name)"
    ),
    "survivor that outlives its warden": Attack(
        "def hide():\n"
        "    attempt(os.setsid)\n"
        "    os.execve('/bin/sleep', ['sleep', '1000'], {})\n"
        "leave(hide)\n"
        "attempt(resource.prlimit, os.getppid(), resource.RLIMIT_CPU, (0, 0))\n"
        "r, w = os.pipe()\n"
        "attempt(fcntl.fcntl, r, 8, os.getppid()); attempt(fcntl.fcntl, r, 10, 9)\n"
        "attempt(fcntl.fcntl, r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')\n"
        "time.sleep(0.5)"
    ),
    "300 MB in many files": Attack(
        "for i in range(100):\n"
        "    with open(f'f{i}', 'wb') as file: file.write(bytes(3 << 20))\n"
        "time.sleep(1); print('harm')",
        ends="exit disk memory",
    ),
    "300 MB in deleted files": Attack(
        "files = []\n"
        "for i in range(50):\n"
        "    files.append(open('f', 'wb', buffering=0)); os.unlink('f'); files[-1].write(bytes(3 << 20))\n"
        "time.sleep(1)\n"
        "for i in range(50):\n"
        "    if os.fork() == 0: files = [open(f'{os.getpid()}', 'wb')]; files[0].write(bytes(3 << 20)); os._exit(0)\n"
        "time.sleep(1); print('harm')",
        ends="exit disk memory processes",
    ),
    "300 MB below a path that is too long": Attack(
        "for i in range(40): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
        "for i in range(100):\n"
        "    with open(f'f{i}', 'wb') as file: file.write(bytes(3 << 20))\n"
        "time.sleep(1); print('harm')",
        ends="exit disk memory",
    ),
    "folders that cannot be read": Attack(
        "os.makedirs('a/b'); os.mkdir('a/b/c', 0); os.mkdir('d', 0)", ends="exit disk"
    ),
    "300 MB in a folder that cannot be read": Attack(
        "os.mkdir('d', 0o300)\n"
        "for i in range(100):\n"
        "    with open(f'd/{i}', 'wb') as file: file.write(bytes(3 << 20))\n"
        "time.sleep(1); print('harm')",
        ends="exit disk memory",
    ),
    "750 MiB of shared memory": Attack(SHARED_MEMORY.format(fd="-1"), ends="exit memory time"),
    "750 MiB of shared memory of a device": Attack(
        SHARED_MEMORY.format(fd="os.open('/dev/zero', os.O_RDWR)"), "files", "exit memory time"
    ),
    "750 MiB in many processes": Attack(
        "r, w = os.pipe()\n"
        "for i in range(12):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(64 << 20); x[::4096] = bytes(len(x) // 4096); os.write(w, b'x'); time.sleep(9)\n"
        "for i in range(12): os.read(r, 1)\n"
        "time.sleep(0.2); print('harm')",
        ends="memory",
    ),
    "350 MiB in large pipes": Attack(
        "def fill():\n"
        "    total, pipes = 0, [os.pipe() for _ in range(25)]\n"
        "    for _, w in pipes:\n"
        "        os.set_blocking(w, False); attempt(fcntl.fcntl, w, 1031, 1 << 20)\n"
        "        while n := attempt(os.write, w, bytes(1 << 16)): total += n\n"
        "    os.write(filled, struct.pack('q', total)); time.sleep(9); return pipes\n"
        "r, filled = os.pipe()\n"
        "for i in range(14):\n"
        "    if os.fork() == 0: fill()\n"
        "if sum(struct.unpack('q', os.read(r, 8))[0] for _ in range(14)) > 330 << 20: print('harm')",
        ends="exit memory",
    ),
    "CPU time of orphans": Attack(
        "def burn():\n"
        "    start = time.process_time()\n"
        "    while time.process_time() - start < 0.4: pass\n"
        "    os._exit(0)\n"
        "for i in range(9):\n"
        "    r, w = os.pipe(); leave(burn); os.close(w); os.read(r, 1); os.close(r)\n"
        "print('harm')",
        ends="time",
        cpu_seconds=0.4,
    ),
    "CPU time of children that nobody waits for": Attack(
        "attempt(signal.signal, signal.SIGCHLD, signal.SIG_IGN)\n"
        "for i in range(90):\n"
        "    r, w = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        start = time.process_time()\n"
        "        while time.process_time() - start < 0.04: pass\n"
        "        os._exit(0)\n"
        "    os.close(w); os.read(r, 1); os.close(r); time.sleep(0.01)\n"
        "print('harm')",
        ends="time processes",
        cpu_seconds=0.4,
    ),
    "files of the user": Attack(
        "for name in ('secret', 'public'):\n"
        "    if attempt(read, f'{FOLDER}/{name}'): print('harm')\n"
        "for path in ('/etc/passwd', '/proc/self/environ', '/proc/mounts'):\n"
        "    if (text := attempt(read, path)) and (b'root:' in text or FOLDER.encode() in text): print('harm')",
        "files",
    ),
    "changes of files": Attack(
        "for name in ('secret', 'public', 'open/new'): attempt(open, f'{FOLDER}/{name}', 'w')\n"
        "for call in (os.unlink, lambda path: os.rename(path, path + '2'), lambda path: os.link(path, 'here')):\n"
        "    attempt(call, f'{FOLDER}/public')\n"
        "attempt(os.truncate, f'{FOLDER}/public', 0)\n"
        "attempt(os.mkdir, f'{FOLDER}/open/folder'); attempt(os.symlink, '/', f'{FOLDER}/open/link')",
        "files",
    ),
    "properties of files": Attack(
        "attempt(os.chmod, f'{FOLDER}/public', 0o777); attempt(os.utime, f'{FOLDER}/public', (0, 0))\n"
        "attempt(os.setxattr, f'{FOLDER}/public', 'user.x', b'x')"
    ),
    "sockets": Attack(
        "attempt(socket.create_connection, ('127.0.0.1', PORT), 1) and print('harm')\n"
        "def connect(path): s = socket.socket(socket.AF_UNIX); s.connect(path); print('harm')\n"
        "attempt(connect, f'{FOLDER}/open/socket'); attempt(connect, f'\\0skyrl-attack-{PORT}')"
    ),
    "another namespace": Attack(
        "for flags in (0x10000000, 0x20000000, 0x10020000, 0x00020000):\n"
        "    if libc.unshare(flags) == 0: print('harm')\n"
        "    pid = libc.syscall(56 if X86 else 220, flags | 17, 0, 0, 0, 0)\n"
        "    if pid == 0: os._exit(0)\n"
        "    if pid > 0: print('harm')"
    ),
    "another user": Attack(
        "for call in (os.setuid, os.setgid, os.seteuid):\n"
        "    attempt(call, 0 if os.getuid() else 1) is None\n"
        "if os.getuid() == 0 and attempt(read, '/proc/1/environ'): print('harm')\n"
        "libc.mount(b'none', b'/usr', b'tmpfs', 0, None) == 0 and print('harm')"
    ),
}
