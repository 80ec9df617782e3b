"""System call filter for programs, and for workers that evaluate what models wrote."""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable, Iterator

from skyrl_gym.isolation.kernel import (
    PR_SET_DUMPABLE,
    PR_SET_MM,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_SECCOMP,
    check_result,
    libc,
    prctl,
)

SECCOMP_MODE_FILTER = 2
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's numbers for them
X32 = 0x40000000  # from here on, alternative numbers for the same calls of x86_64

NUMBERS: dict[str, tuple[int, int]] = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chmod": (90, -1),
    "chown": (92, -1),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fcntl": (72, 25),
    "file_setattr": (469, 469),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "futimesat": (261, -1),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "lchown": (94, -1),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mmap": (9, 222),
    "move_pages": (279, 239),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "open": (2, -1),
    "open_by_handle_at": (304, 265),
    "openat": (257, 56),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "rt_sigaction": (13, 134),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "sendmmsg": (307, 269),
    "sendmsg": (46, 211),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setsid": (112, 157),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "socket": (41, 198),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "truncate": (76, 45),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, -1),
    "utimensat": (280, 88),
    "utimes": (235, -1),
    "vmsplice": (278, 75),
}
"""System call numbers on the `ARCHITECTURES`, -1 where a call does not exist."""

Word = int
Condition = tuple[Word, int, int, bool]
"""A test of 32 bits of the arguments: (word, mask, value, is_equal). Word 2·i is the low half of argument i."""
Rule = tuple[str, tuple[Condition, ...]]
"""A system call that is refused if all conditions hold."""


def _is(word: Word, value: int, mask: int = 0xFFFFFFFF) -> Condition:
    return (word, mask, value, True)


def _is_not(word: Word, value: int, mask: int = 0xFFFFFFFF) -> Condition:
    return (word, mask, value, False)


SIGCHLD = 17
F_SETOWN, F_SETOWN_EX, F_SETPIPE_SZ, FIOSETOWN, SIOCSPGRP = 8, 15, 1031, 0x8901, 0x8902
CLONE_NEW = 0x7E020080  # every flag of clone that creates a namespace
MAP_SHARED_ANONYMOUS = 0x21
O_TMPFILE = 0x400000
PRIO_PROCESS, IOPRIO_WHO_PROCESS = 0, 1

ALWAYS: tuple[Rule, ...] = (
    *((name, ()) for name in ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp")),
    *((name, ()) for name in ("process_madvise", "process_mrelease", "migrate_pages", "move_pages")),
    *((name, ()) for name in ("socket", "sendmsg", "sendmmsg", "io_uring_setup", "bpf", "perf_event_open")),
    *((name, ()) for name in ("add_key", "request_key", "keyctl", "userfaultfd", "open_by_handle_at")),
    # Memory that no limit counts. One page in a pipe may keep a huge page alive.
    *((name, ()) for name in ("memfd_create", "memfd_secret", "vmsplice")),
    # System V IPC: no limit counts it, and the ids of other processes' objects are easy to guess.
    *((name, ()) for name in ("shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl")),
    *((name, ()) for name in ("msgget", "msgsnd", "msgrcv", "msgctl")),
    # Capabilities in a new namespace.
    *((name, ()) for name in ("unshare", "setns")),
    ("clone", (_is_not(0, 0, CLONE_NEW),)),
    # Limits, priorities and signals of other processes, e.g. the warden.
    ("fcntl", (_is(2, F_SETOWN),)),
    ("fcntl", (_is(2, F_SETOWN_EX),)),
    ("ioctl", (_is(2, FIOSETOWN),)),
    ("ioctl", (_is(2, SIOCSPGRP),)),
    ("prlimit64", (_is_not(0, 0),)),
    *((f"sched_set{what}", (_is_not(0, 0),)) for what in ("affinity", "attr", "param", "scheduler")),
    ("setpriority", (_is_not(0, PRIO_PROCESS),)),
    ("setpriority", (_is_not(2, 0),)),
    ("ioprio_set", (_is_not(0, IOPRIO_WHO_PROCESS),)),
    ("ioprio_set", (_is_not(2, 0),)),
    # Children whose parent ignores SIGCHLD are reaped without their CPU time.
    ("rt_sigaction", (_is(0, SIGCHLD), _is_not(2, 0))),
    ("rt_sigaction", (_is(0, SIGCHLD), _is_not(3, 0))),
)
"""Refused at every level: access to other processes, sockets, and resources that no limit counts."""

UNCOUNTED_MEMORY: tuple[Rule, ...] = (
    ("mmap", (_is(6, MAP_SHARED_ANONYMOUS, MAP_SHARED_ANONYMOUS),)),
    ("fcntl", (_is(2, F_SETPIPE_SZ),)),
)
"""Memory that only a cgroup counts."""

OTHER_PROCESSES: tuple[Rule, ...] = (
    ("kill", (_is_not(0, 0),)),  # 0 is the caller's process group, and nothing can leave it
    *((name, ()) for name in ("setsid", "setpgid", "tkill", "tgkill")),
    *((name, ()) for name in ("rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")),
    ("prctl", (_is(0, PR_SET_DUMPABLE),)),  # would hide open files from the warden
    ("prctl", (_is(0, PR_SET_MM),)),
    # File properties: Landlock does not restrict them.
    *((name, ()) for name in ("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "fchownat", "lchown")),
    *((name, ()) for name in ("utime", "utimes", "futimesat", "utimensat", "truncate", "file_setattr")),
    *((f"{kind}xattr", ()) for kind in ("set", "lset", "fset", "remove", "lremove", "fremove")),
    *((name, ()) for name in ("setxattrat", "removexattrat")),
    # Unnamed files: nothing counts them.
    ("open", (_is(2, O_TMPFILE, O_TMPFILE),)),
    ("openat", (_is(4, O_TMPFILE, O_TMPFILE),)),
)
"""Refused without namespaces: signals to other processes, and file changes that nothing else prevents."""

NOT_IMPLEMENTED = ("clone3", "openat2")
"""Calls that fail with ENOSYS, because a filter cannot read their arguments. The C library falls back to older calls.
"""

LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # operations of the filter
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000  # its return values. An error number is added to REFUSE.
CALL_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16  # in the data of a call

Step = tuple[int, int, int, int]


def has_filter() -> bool:
    """Return True if `forbid_calls` works on this machine."""
    return sys.platform == "linux" and os.uname().machine in ARCHITECTURES


def forbid_calls(*, is_alone: bool, counts_memory: bool) -> None:
    """Make sockets and access to other processes fail with EPERM from now on.

    Signals and changes to file properties also fail, unless the process `is_alone` in its namespaces. Shared anonymous
    memory fails unless a cgroup `counts_memory`. Do nothing on machines without a filter.
    """
    if not has_filter():
        return
    rules = ALWAYS + (() if is_alone else OTHER_PROCESSES) + (() if counts_memory else UNCOUNTED_MEMORY)
    steps = list(_filter(os.uname().machine, rules))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(steps), ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    check_result("seccomp", libc().prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def _filter(machine: str, rules: Iterable[Rule]) -> Iterator[Step]:
    """Yield steps (operation, skip if true, skip if false, operand) that implement the rules."""
    column = list(ARCHITECTURES).index(machine)
    yield (LOAD, 0, 0, ARCHITECTURE_OFFSET)
    yield (EQUAL, 1, 0, ARCHITECTURES[machine])
    yield (RETURN, 0, 0, KILL)
    yield (LOAD, 0, 0, CALL_OFFSET)
    yield (AT_LEAST, 0, 1, X32)
    yield (RETURN, 0, 0, REFUSE | errno.EPERM)
    for name in NOT_IMPLEMENTED:
        yield from _rule(NUMBERS[name][column], (), errno.ENOSYS)
    for name, conditions in rules:
        if (number := NUMBERS[name][column]) >= 0:
            yield from _rule(number, conditions, errno.EPERM)
    yield (RETURN, 0, 0, ALLOW)


def _rule(number: int, conditions: tuple[Condition, ...], error: int) -> list[Step]:
    """Return a rule's steps. At their start and end, the loaded value is the call's number.

    A filter can only jump forward. A rule with one condition has six steps, here with the step that follows if a test
    fails:

        0  EQUAL number      6: the next rule, which compares the number again
        1  LOAD argument
        2  AND mask
        3  EQUAL value       5
        4  RETURN refuse
        5  LOAD number       restores what the next rule expects

    Steps are built from the last condition to the first, so the length of the steps after a test is known when it is
    added: each failed condition skips to the last step.
    """
    steps: list[Step] = [(RETURN, 0, 0, REFUSE | error)]
    if conditions:
        steps.append((LOAD, 0, 0, CALL_OFFSET))
    for word, mask, value, is_equal in reversed(conditions):
        n_left = len(steps) - 1  # steps to skip if the condition does not hold, up to the load of the number
        skips = (0, n_left) if is_equal else (n_left, 0)
        steps[:0] = [(LOAD, 0, 0, ARGUMENTS_OFFSET + 4 * word), (AND, 0, 0, mask), (EQUAL, *skips, value)]
    return [(EQUAL, 0, len(steps), number), *steps]
