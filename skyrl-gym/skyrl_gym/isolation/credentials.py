"""A process's user and capabilities."""

import ctypes
import os
import sys
from collections.abc import Iterable, Sequence

from skyrl_gym.isolation.kernel import PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, check_result, libc, prctl

CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SETGID, CAP_SETUID = 0, 1, 2, 5, 6, 7
PR_CAPBSET_DROP, CAPABILITY_VERSION = 24, 0x20080522
THROWAWAY_USERS = (range(1 << 30, (1 << 30) + (1 << 22)), range(60_000, 65_000))
"""Ids that no account has. The first range is large enough for one id per process of a machine. The second, for
containers with few ids, is enough for the programs that run at the same time."""


def throwaway_user() -> int | None:
    """Return an unused user id for this process's children, or None if it may not assign one.

    It may not if it is not root, or is a container's root without these rights.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return None
    needed = 1 << CAP_SETUID | 1 << CAP_SETGID | 1 << CAP_CHOWN | 1 << CAP_KILL
    if _capabilities() & needed != needed:
        return None
    for ids in THROWAWAY_USERS:
        if all(_is_mapped(f"/proc/self/{kind}_map", ids) for kind in ("uid", "gid")):
            return ids[os.getpid() % len(ids)]
    return None


def become_user(user: int, capabilities: Sequence[int] = ()) -> None:
    """Become an unprivileged user, permanently, with the first of `capabilities` that this process has.

    Raises:
        OSError: it has none of them.
    """
    available = [capability for capability in capabilities if _capabilities() >> capability & 1]
    if capabilities and not available:
        raise OSError(f"user {user} cannot read Python's files; install Python where every user may read it, e.g. /opt")
    os.setgroups([])
    prctl(PR_SET_KEEPCAPS, 1)
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    drop_capabilities(sum(1 << capability for capability in available[:1]))


def drop_capabilities(kept: int = 0) -> None:
    """Drop all capabilities except the bit set `kept`. Executing a program does not restore them."""
    for capability in range(64):
        prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)  # effective, permitted and inheritable, twice
    check_result("capset", libc().capset(header, sets))


def is_readable_by_all(paths: Iterable[str]) -> bool:
    """Return True if every user may read these folders, judging by permissions. Missing folders are ignored."""
    for path in filter(os.path.isdir, paths):
        if os.stat(path).st_mode & 0o005 != 0o005:
            return False
        while (path := os.path.dirname(path)) != "/":
            if not os.stat(path).st_mode & 0o001:
                return False
    return True


def _capabilities() -> int:
    """Return the bit set of effective capabilities."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))


def _is_mapped(file: str, ids: range) -> bool:
    """Return True if these ids exist in this process's user namespace."""
    with open(file, encoding="ascii") as lines:
        ranges = [tuple(map(int, line.split())) for line in lines]
    return any(first <= ids[0] and ids[-1] < first + count for first, _, count in ranges)
