"""A place of its own for a program: processes, network and files that are nobody else's. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NoReturn

from skyrl_gym.isolation.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, checked, libc, prctl

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
SYS_MOUNT_SETATTR, SYS_PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
PR_CAPBSET_DROP, CAPABILITY_VERSION = 24, 0x20080522

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
PLACE = "/program"  # where a program may write
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def enter_namespaces() -> None:
    """Leave for namespaces of our own, under the same user. The next child is the first process of the new ones.

    Raises:
        OSError: the kernel or its rules forbid it.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has namespaces")
    user, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    checked("unshare", libc().unshare(flags))
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    with suppress(OSError):  # an old kernel has no such limit
        _write("/proc/sys/user/max_user_namespaces", "0")  # nobody gets rights back in a namespace below


def watch_over(first: Callable[[], None]) -> NoReturn:
    """Let a child, the first process of the new namespace, do `first`; end as it ends, and it with us."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            first()
            status = 0
        except BaseException:  # noqa: BLE001, the boundary of a process
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 255)


def close_off(folder: str, n_bytes: int, python: Iterable[str]) -> None:
    """Make `folder`, in memory, the root of a file system in which there is little, and give all rights away.

    In it are the system's programs and libraries and the folders `python`, read-only; of `/proc` only processes; and
    `PLACE`, empty, the only folder that can be written, which is the current one from now on. Its files take `n_bytes`
    at most.
    """
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    _mount("none", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in _outermost((*SYSTEM, *DEVICES, *python)):
        _show(path, folder)
    for name in ("/proc", "/dev", PLACE):
        os.makedirs(folder + name, exist_ok=True)
    for name in ("/dev/shm", "/tmp"):
        if not os.path.lexists(folder + name):  # Python may be installed below /tmp
            os.symlink(PLACE, folder + name)
    _mount("proc", f"{folder}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
    _mount("none", folder + PLACE, "tmpfs", MS_NOSUID | MS_NODEV, f"size={n_bytes},mode=755,nr_inodes=4096")
    _make_read_only(folder)
    os.chdir(folder)
    checked("pivot_root", libc().syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."))
    checked("umount2", libc().umount2(b".", MNT_DETACH))
    os.chdir(PLACE)
    _give_rights_away()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = libc().mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    checked(f"mount {target}", result)


def _outermost(paths: Iterable[str]) -> Iterator[str]:
    """Those that exist and do not lie below another."""
    last = ""
    for path in sorted(path for path in set(paths) if os.path.lexists(path)):
        if not last or not path.startswith(last + "/"):
            last = path
            yield path


def _show(path: str, root: str) -> None:
    """Let `path` be seen below `root` as well, read-only; what it means to write to a device is another matter."""
    target = root + path
    if os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        _write(target, "")
    _mount(path, target, flags=MS_BIND | MS_REC)
    _make_read_only(target, AT_RECURSIVE)


def _make_read_only(path: str, flags: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = libc().syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, size)
    checked(f"mount_setattr {path}", result)


def _give_rights_away() -> None:
    """No process from here on can mount, or gain rights by a program that it runs."""
    for capability in range(64):
        prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    checked("capset", libc().capset(header, none))
