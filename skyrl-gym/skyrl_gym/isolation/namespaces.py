"""Linux namespaces for a program: its own processes, network and file system."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NoReturn

from skyrl_gym.isolation.credentials import drop_capabilities
from skyrl_gym.isolation.files import MAX_FILES
from skyrl_gym.isolation.kernel import PR_SET_PDEATHSIG, check_result, libc, prctl

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MAX_SHARED_PAGES = 1 << 18  # of System V shared memory, 1 GiB
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
SYS_MOUNT_SETATTR, SYS_PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
PROGRAM_FILES = ("/etc/alternatives", "/etc/ssl/certs", "/etc/nsswitch.conf", "/sbin")
"""What installed programs read besides `SYSTEM`: no accounts, no settings of this machine, no secrets."""
WORK_DIR = "/program"  # the only writable folder
RANDOM = ("/dev/random", "/dev/urandom")
DEVICES = (os.devnull, *RANDOM)  # not /dev/zero: its shared mappings are memory that belongs to no process


def enter_namespaces() -> None:
    """Enter new namespaces as the same user. The next child is the first process of the new process namespace.

    Raises:
        OSError: the kernel or its configuration forbids it.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has namespaces")
    user, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    check_result("unshare", libc().unshare(flags))
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    with suppress(OSError):  # an old kernel has no such limit
        _write("/proc/sys/user/max_user_namespaces", "0")  # a nested namespace would restore capabilities
    with suppress(OSError):  # only the owner of the namespace may, in recent kernels
        _write("/proc/sys/kernel/shmall", str(MAX_SHARED_PAGES))  # this memory belongs to no process


def run_as_init(function: Callable[[], None]) -> NoReturn:
    """Run `function` in a child, the first process of the new namespace. Exit with its status.

    The kernel kills the child if this process dies."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            function()
            status = 0
        except BaseException:  # noqa: BLE001, the boundary of a process
            traceback.print_exc()
        finally:
            os._exit(status)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 255)


def isolate_files(folder: str, n_bytes: int, python: Iterable[str]) -> None:
    """Make `folder` the root of a minimal file system in memory, and drop all capabilities.

    The file system holds the system's programs and libraries and the folders `python`, all read-only, `/proc` with the
    program's processes, `/dev/stdin`, and an empty `WORK_DIR`. `WORK_DIR` is the only writable folder, becomes the
    current folder, and holds at most `n_bytes`.
    """
    _build_root(folder, (*SYSTEM, *DEVICES, *python))
    os.makedirs(folder + WORK_DIR, exist_ok=True)
    for name in ("/dev/shm", "/tmp"):
        if not os.path.lexists(folder + name):  # Python may be installed below /tmp
            os.symlink(WORK_DIR, folder + name)
    _mount("none", folder + WORK_DIR, "tmpfs", MS_NOSUID | MS_NODEV, f"size={n_bytes},mode=755,nr_inodes={MAX_FILES}")
    _enter_root(folder, WORK_DIR)


def isolate_folders(
    folder: str, readable: Iterable[str], writable: Mapping[str, str], files: Mapping[str, str], cwd: str
) -> None:
    """Make `folder` the root of a file system in which any installed program can run. Drop all capabilities.

    Args:
        folder: an empty folder.
        readable: paths of this machine to mount read-only at the same path, in addition to the system's programs.
        writable: folders and Unix sockets of this machine, by their path in the new root, e.g.
            `{"/workspace": "/tmp/abc/work"}`. Changes are visible on this machine. Must include `/tmp`, because
            `/dev/shm` links to it.
        files: read-only files to create: ASCII text by path.
        cwd: the current folder, as a path in the new root.
    """
    _build_root(folder, (*SYSTEM, *PROGRAM_FILES, *DEVICES, "/dev/zero"))
    for path, source in sorted(writable.items()):  # outer folders first
        target = _create_target(folder, path, is_folder=os.path.isdir(source))
        _mount(source, target, flags=MS_BIND)
    for path in outermost(readable):  # after the writable folders, which may contain them
        _bind(path, folder)
    for path, text in files.items():
        _write(_create_target(folder, path, is_folder=False), text)
    for name, target in (("fd", "/proc/self/fd"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("shm", "/tmp")):
        os.symlink(target, f"{folder}/dev/{name}")
    _enter_root(folder, cwd)


def _build_root(folder: str, readable: Iterable[str]) -> None:
    """Mount a file system in memory at `folder`, with `readable`, `/proc` and `/dev/stdin`."""
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    _mount("none", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in outermost(readable):
        _bind(path, folder)
    for name in ("/proc", "/dev"):
        os.makedirs(folder + name, exist_ok=True)
    os.symlink("/proc/self/fd/0", f"{folder}/dev/stdin")
    _mount("proc", f"{folder}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")


def _enter_root(folder: str, cwd: str) -> None:
    """Make `folder` the root, read-only except for what is mounted in it, and drop all capabilities."""
    _make_read_only(folder)
    os.chdir(folder)
    check_result("pivot_root", libc().syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."))
    check_result("umount2", libc().umount2(b".", MNT_DETACH))
    os.chdir(cwd)
    drop_capabilities()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = libc().mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    check_result(f"mount {target}", result)


def outermost(paths: Iterable[str]) -> Iterator[str]:
    """Yield the existing paths that are not inside another of them."""
    last = ""
    for path in sorted(path for path in set(paths) if os.path.lexists(path)):
        if not last or not path.startswith(last + "/"):
            last = path
            yield path


def _bind(path: str, root: str) -> None:
    """Mount `path` read-only below `root`. Devices can still be written to."""
    if os.path.islink(path):
        target = _create_target(root, path, is_folder=None)
        if not os.path.lexists(target):
            os.symlink(os.readlink(path), target)
        return
    target = _create_target(root, path, is_folder=os.path.isdir(path))
    _mount(path, target, flags=MS_BIND | MS_REC)
    _make_read_only(target, AT_RECURSIVE)


def _create_target(root: str, path: str, *, is_folder: bool | None) -> str:
    """Create an empty folder or file for `path` below `root`, or only its parent if `is_folder` is None. Return it.

    Raises:
        OSError: a symbolic link leads out of `root`. An earlier program may have left it in a writable folder.
    """
    target, real_root = root + path, os.path.realpath(root)
    resolved = os.path.realpath(os.path.dirname(target) if is_folder is None else target)
    if resolved != real_root and not resolved.startswith(real_root + "/"):
        raise OSError(f"{path} is a symbolic link that leads out of the workspace")
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if is_folder is False and not os.path.lexists(target):
        _write(target, "")
    return target


def _make_read_only(path: str, flags: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = libc().syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, size)
    check_result(f"mount_setattr {path}", result)
