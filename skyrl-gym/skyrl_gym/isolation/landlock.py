"""Landlock: an unprivileged process gives up access to files, TCP and other processes.

Available since Linux 5.13. Each version of its interface (ABI) restricts more: version 4 (Linux 6.7) adds TCP, and
version 6 (Linux 6.12) signals and abstract sockets. At every version, a restricted process cannot trace others.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from functools import cache

from skyrl_gym.isolation.kernel import PR_SET_NO_NEW_PRIVS, check_result, libc, prctl

SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION, RULE_PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
TRUNCATE = 1 << 14
READ = EXECUTE | READ_FILE | READ_DIR
FILE_ACCESS = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE  # rights that we grant on files
N_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version. Newer versions have MAX_FILE_RIGHTS.
MAX_FILE_RIGHTS = 16
NETWORK_VERSION, SCOPE_VERSION = 4, 6
NETWORK = 0b11  # bind and connect TCP sockets
SCOPES = 0b11  # abstract Unix sockets and signals


@cache
def landlock_version() -> int:
    """Return the kernel's Landlock version, or 0 if it has none."""
    if sys.platform != "linux":
        return 0
    return max(0, libc().syscall(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION))


def restrict_access(read: Iterable[str], write: Iterable[str], version: int | None = None) -> None:
    """Restrict the calling thread and its future children to reading under `read` and changing files under `write`.

    Paths may be files or folders. Missing ones are ignored. Files that are already open stay usable.

    Raises:
        OSError: the kernel has no Landlock, or a path cannot be opened.
    """
    version = landlock_version() if version is None else version
    rights = (1 << N_FILE_RIGHTS.get(version, MAX_FILE_RIGHTS)) - 1
    attributes = struct.pack("Q", rights)
    if version >= NETWORK_VERSION:
        attributes += struct.pack("Q", NETWORK)
    if version >= SCOPE_VERSION:
        attributes += struct.pack("Q", SCOPES)
    ruleset = check_result(
        "landlock_create_ruleset", libc().syscall(SYS_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    )
    try:
        for path in read:
            _allow(ruleset, path, rights & READ)
        for path in write:
            _allow(ruleset, path, rights & ~(MAKE_CHAR | MAKE_BLOCK | MAKE_SOCK))
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        check_result("landlock_restrict_self", libc().syscall(SYS_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights &= ~0 if os.path.isdir(path) else FILE_ACCESS
        rule = struct.pack("=Qi", rights, fd)
        result = libc().syscall(SYS_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0)
        check_result(f"landlock_add_rule {path}", result)
    finally:
        os.close(fd)
