"""Checkpoints in remote storage: S3, or any fsspec file system.

<url>/<project>/<model>/<run_name>/
    latest_ckpt_global_step.txt     the run's latest step. Later folders are from before it resumed at an earlier step
    global_step_N/                  the files of a checkpoint. `checksums.json` is written last and makes it complete

Object stores cannot rename folders, so writing `checksums.json` replaces the rename in `store`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from io import BytesIO
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper
from xxhash import xxh3_128

from skyrl_train.checkpoint.manifest import MANIFEST, Fingerprint, parse_manifest
from skyrl_train.checkpoint.store import POINTER, describe_fix, parse_steps, step_of
from skyrl_train.errors import CheckpointError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

CHUNK_BYTES = 8 * 2**20
N_ATTEMPTS = 3
"""Attempts per remote operation. The client may also retry by itself."""

RETRY_S = 0.5
"""Seconds before the second attempt, doubled after each failure."""

S3_SCHEMES = ("s3", "s3a")
STORAGE_ERRORS = (OSError, RuntimeError, ValueError, ImportError)
"""Errors that clients of remote storage raise."""


def find_credentials_fault(url: str, environ: Mapping[str, str]) -> str | None:
    """Return which S3 credentials are missing for a URL, or None if there are enough or the protocol is not S3."""
    if urlsplit(url).scheme not in S3_SCHEMES:
        return None
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [key for key in keys if not environ.get(key)]
    roles = ("AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_ROLE_ARN")
    file = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    if not missing or (len(missing) == 2 and (any(environ.get(name) for name in roles) or file.is_file())):
        return None
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, and there is no {file}"


def _retrying(operation: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to retry it after a transient error."""

    @wraps(operation)
    def retried(*args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(1, N_ATTEMPTS):
            try:
                return operation(*args, **kwargs)
            except (FileNotFoundError, PermissionError, ImportError, ValueError):
                raise  # a retry would fail too
            except STORAGE_ERRORS:
                time.sleep(RETRY_S * 2 ** (attempt - 1))
        return operation(*args, **kwargs)

    return retried


@dataclass(frozen=True)
class RemoteFolder:
    """A folder at a URL. Methods block, retry failures, and raise one of `STORAGE_ERRORS`."""

    url: str

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url.rstrip('/')}/{name}")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """Return the URL's file system and the path in it.

        S3 uses pyarrow's client, because pyarrow is always installed. $AWS_ENDPOINT_URL sets another server.
        """
        if urlsplit(self.url).scheme not in S3_SCHEMES:
            return fsspec.core.url_to_fs(self.url)
        from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        parts = urlsplit(endpoint) if endpoint else None
        client = S3FileSystem(
            region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None,
            endpoint_override=parts.netloc if parts else None,
            scheme=parts.scheme if parts else None,
            connect_timeout=30,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=3),
        )
        return ArrowFSWrapper(client), self.url.partition("://")[2]

    def connect(self) -> None:
        """Open the file system, without reading a file."""
        _ = self._opened

    @_retrying
    def names(self) -> list[str]:
        """Return the names of the files and folders in this folder, or an empty list if it does not exist."""
        system, path = self._opened
        system.invalidate_cache()
        try:
            entries = system.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({entry.rstrip("/").rpartition("/")[2] for entry in entries})

    @_retrying
    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file under this folder, by relative path."""
        system, path = self._opened
        system.invalidate_cache()
        root, folders = path.strip("/"), [path]
        sizes: dict[str, int] = {}
        while folders:  # `find` would leave out a folder that cannot be listed, as if it had no files
            try:
                entries = system.ls(folders.pop(), detail=True)
            except FileNotFoundError:
                continue
            for entry in entries:
                name = entry["name"].strip("/")
                if name == root:  # some file systems list a folder in itself
                    continue
                if entry["type"] == "directory":
                    folders.append(entry["name"])
                else:
                    sizes[name.removeprefix(f"{root}/")] = int(entry["size"])
        return sizes

    @_retrying
    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        system, path = self._locate(name)
        try:
            with system.open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    @_retrying
    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        self._write(name, BytesIO(content))

    @_retrying
    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        system, path = self._locate(name)
        with suppress(FileNotFoundError):
            system.rm_file(path)

    @_retrying
    def upload_file(self, source: Path, name: str) -> Fingerprint:
        """Copy a local file to `name`, in parts if it is large, and return the fingerprint of the sent bytes."""
        with source.open("rb") as file:
            return self._write(name, file)

    @_retrying
    def download_file(self, name: str, target: Path) -> Fingerprint:
        """Copy the file `name` to a local path, and return the fingerprint of the received bytes."""
        system, path = self._locate(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with system.open(path, "rb") as remote, target.open("wb") as file:
            return _copy(remote, file)

    def check_sizes(self, n_bytes: Mapping[str, int]) -> None:
        """Raise OSError if a file does not have its expected size."""
        sizes = self.sizes()
        if short := [name for name, expected in n_bytes.items() if sizes.get(name) != expected]:
            raise OSError(f"{(self / short[0]).url} has {sizes.get(short[0], 0):,} bytes after the upload")

    def _write(self, name: str, source: IO[bytes]) -> Fingerprint:
        system, path = self._locate(name)
        if not isinstance(system, ArrowFSWrapper):  # S3 has no folders, and would get an empty object instead
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
        with system.open(path, "wb") as file:
            return _copy(source, file)

    def _locate(self, name: str) -> tuple[Any, str]:
        system, path = self._opened
        return system, f"{path.rstrip('/')}/{name}"


def _copy(source: IO[bytes], target: IO[bytes]) -> Fingerprint:
    """Copy a file to another, and return the fingerprint of the copied bytes."""
    checksum, n_bytes = xxh3_128(), 0
    while chunk := source.read(CHUNK_BYTES):
        checksum.update(chunk)
        n_bytes += len(chunk)
        target.write(chunk)
    return Fingerprint(n_bytes, checksum.hexdigest())


class RemoteCheckpoints:
    """The checkpoints of one run in remote storage. Methods block, and raise one of `STORAGE_ERRORS`."""

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, complete or not, ascending."""
        return parse_steps(self.folder.names())

    def is_complete(self, step: int, like: Path | None = None) -> bool:
        """Return True if every file of a checkpoint exists with the right size, and its checksums are as in `like`."""
        folder = self._folder(step)
        manifest = folder.read(MANIFEST)
        if manifest is None or (like is not None and manifest != (like / MANIFEST).read_bytes()):
            return False
        files = parse_manifest(manifest)
        sizes = folder.sizes()
        return files is not None and all(sizes.get(name) == saved.n_bytes for name, saved in files.items())

    def latest_step(self) -> int | None:
        """Return the latest complete checkpoint up to the pointer's step, or None.

        Later checkpoints are from before the run was resumed at an earlier step.
        """
        pointer = (self.folder.read(POINTER) or b"").strip()
        newest = int(pointer) if pointer.isdigit() else None
        steps = (step for step in reversed(self.steps()) if newest is None or step <= newest)
        return next((step for step in steps if self.is_complete(step)), None)

    def point_to(self, step: int) -> None:
        """Make `step` the run's latest step, so that a resumed run does not continue from a later one."""
        self.folder.write(POINTER, f"{step}\n".encode())

    def upload(self, checkpoint: Path) -> int:
        """Upload a local checkpoint, check it, and write its `checksums.json` last.

        Return the number of uploaded bytes, 0 if the checkpoint was already there. If a local file has changed since it
        was saved, raise CheckpointError, because a retry would not help.
        """
        manifest = (checkpoint / MANIFEST).read_bytes()
        files = parse_manifest(manifest)
        if files is None:
            raise CheckpointError(f"{checkpoint / MANIFEST} is damaged, so the checkpoint is not uploaded")
        target = self.folder / checkpoint.name
        if self.is_complete(step_of(checkpoint), like=checkpoint):
            return 0
        if target.read(MANIFEST) not in (None, manifest):
            target.remove(MANIFEST)  # marks the replaced checkpoint as incomplete before its files change
        for name, saved in files.items():
            sent = target.upload_file(checkpoint / name, name)
            if sent != saved:
                raise CheckpointError(
                    f"the content of {checkpoint / name} has changed since it was saved, so it is not uploaded"
                )
        target.check_sizes({name: saved.n_bytes for name, saved in files.items()})
        target.write(MANIFEST, manifest)
        return sum(saved.n_bytes for saved in files.values())

    def size(self, step: int) -> int:
        """Return the size of a checkpoint in bytes."""
        return sum(self._folder(step).sizes().values())

    def download(self, step: int, folder: Path) -> None:
        """Copy a checkpoint into an existing local folder and compare each file with its checksum.

        Raise CheckpointError if files are missing or have changed. The message names them.
        """
        source = self._folder(step)
        manifest = source.read(MANIFEST)
        files = parse_manifest(manifest or b"")
        if manifest is None or files is None:
            fault = "is missing" if manifest is None else "is damaged"
            raise CheckpointError(f"cannot resume from {source.url}: {MANIFEST} {fault}. {self._fix(step)}")
        damage = []
        for name, saved in files.items():
            try:
                received = source.download_file(name, folder / name)
                if received != saved:
                    received = source.download_file(name, folder / name)  # the network may have damaged it
            except FileNotFoundError:
                damage.append(f"{(source / name).url} is missing")
                continue
            if received != saved:
                damage.append(f"the content of {(source / name).url} has changed since it was saved")
        if damage:
            raise CheckpointError(f"cannot resume from {source.url}: {', '.join(damage)}. {self._fix(step)}")
        (folder / MANIFEST).write_bytes(manifest)

    def _fix(self, damaged_step: int) -> str:
        earlier = (step for step in reversed(self.steps()) if step != damaged_step)
        complete = next((step for step in earlier if self.is_complete(step)), None)
        return describe_fix(None if complete is None else self._folder(complete).url, self.folder.url)

    def _folder(self, step: int) -> RemoteFolder:
        return self.folder / f"global_step_{step}"


def open_folder(url: str | None, key: str, content: str) -> RemoteFolder | None:
    """Return the folder at `url`, the value of the configuration key `key`, or None if there is no URL.

    Without credentials for the URL, log that its `content` stays on this machine, and return None.
    """
    if url is not None and (fault := find_credentials_fault(url, os.environ)):
        logger.warning("%s is set, but %s stay on this machine: %s", key, content, fault)
        return None
    return None if url is None else RemoteFolder(url)


def upload_files(source: Path, target: RemoteFolder) -> int:
    """Upload the files that the target lacks or has in another size. Return the number of uploaded bytes.

    `*.partial` files are skipped, because another thread is writing them.
    """
    found = sorted(path for path in source.rglob("*") if path.suffix != ".partial" and path.is_file())
    paths = {path.relative_to(source).as_posix(): path for path in found}
    remote_sizes = target.sizes()
    sent = {
        name: target.upload_file(path, name).n_bytes
        for name, path in paths.items()
        if remote_sizes.get(name) != path.stat().st_size
    }
    target.check_sizes(sent)
    return sum(sent.values())
