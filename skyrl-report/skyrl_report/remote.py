"""Folders in remote storage: S3, or any fsspec file system. Local paths are URLs, too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

import fsspec
from xxhash import xxh3_128

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


class Fingerprint(NamedTuple):
    """Size and checksum of a file."""

    n_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class RemoteFolder:
    """A folder at a URL. Methods block, retry failures, and raise one of `STORAGE_ERRORS`."""

    url: str

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url.rstrip('/')}/{name}")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """Return the URL's file system and the path in it.

        S3 uses pyarrow's client, because the trainer needs pyarrow anyway. $AWS_ENDPOINT_URL sets another server.
        """
        if urlsplit(self.url).scheme not in S3_SCHEMES:
            return fsspec.core.url_to_fs(self.url)
        try:
            from fsspec.implementations.arrow import ArrowFSWrapper
            from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem
        except ImportError as error:
            raise ImportError(f"{error}; S3 needs pyarrow: pip install './skyrl-report[s3]'") from error

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
        if urlsplit(self.url).scheme not in S3_SCHEMES:  # S3 has no folders, and would get an empty object instead
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
