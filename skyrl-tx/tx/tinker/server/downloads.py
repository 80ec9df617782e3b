"""Signed download addresses for checkpoint files. The address and its expiry are the only access control."""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tarfile
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tx.tinker.refusal import RefusalError

logger = logging.getLogger(__name__)

READ_SIZE = 1 << 20
ARCHIVE = "archive.tar"
"""The file name that stands for an archive of all files."""
TOKEN = re.compile(r"(/downloads/)[^/]*")
KEY_FILE, KEY_SIZE = "download_key", 32


def signing_key(folder: Path) -> bytes:
    """Return the signing key in a folder, creating it if missing. Addresses stay valid across restarts."""
    file = folder / KEY_FILE
    if file.exists() and file.stat().st_size != KEY_SIZE:
        logger.warning(
            "%s is not a valid key; a new one is created, and existing download addresses become invalid", file
        )
        file.unlink()
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{KEY_FILE}-{secrets.token_hex(8)}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(KEY_SIZE))
            opened.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(new, file)
        new.unlink()
    return file.read_bytes()


class Download(NamedTuple):
    """A file that an address gives access to."""

    path: str  # of a checkpoint
    file: str
    expires: int  # seconds since 1970


def sign(download: Download, key: bytes) -> str:
    """Return the signed token of a download address."""
    payload = urlsafe_b64encode(json.dumps(download).encode()).decode().rstrip("=")
    return f"{payload}.{_signature(payload, key)}"


def verify(token: str, key: bytes) -> Download:
    """Return the download that a token permits. Raise `RefusalError` 403 if the signature is invalid or expired."""
    payload, _, signature = token.partition(".")
    if not hmac.compare_digest(_signature(payload, key).encode(), signature.encode()):
        raise RefusalError(403, "this address is not signed by this server; request a new one")
    download = Download(*json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4))))
    if time.time() > download.expires:
        raise RefusalError(403, "this address has expired; request a new one")
    return download


def hide_token(path: str) -> str:
    """Return an address's path for the log, without the token: anyone with the token may download the file."""
    return TOKEN.sub(r"\1[hidden]", path)


def _signature(payload: str, key: bytes) -> str:
    return hmac.new(key, payload.encode(), hashlib.sha256).hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Return all files under a folder, sorted."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def tar_parts(folder: Path) -> Iterator[bytes]:
    """Yield a folder's files as a tar archive in chunks, without loading a whole file."""
    for file in files_of(folder):
        with file.open("rb") as opened:
            info = tarfile.TarInfo(file.relative_to(folder).as_posix())
            status = file.stat()
            info.size, info.mtime, info.mode = status.st_size, int(status.st_mtime), 0o644
            yield info.tobuf(tarfile.GNU_FORMAT)
            while part := opened.read(READ_SIZE):
                yield part
        yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)
