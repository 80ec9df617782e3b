"""Files of checkpoints for anyone who has the address, which says until when it is good, and is signed."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import tarfile
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tx.tinker.refusal import Refusal

logger = logging.getLogger(__name__)

READ_SIZE = 1 << 20
ARCHIVE = "archive.tar"
"""The file that stands for all of them."""


KEY_FILE, KEY_SIZE = "download_key", 32


def signing_key(folder: Path) -> bytes:
    """The key in a folder, made by the first who asks: addresses stay good when a server is started again."""
    file = folder / KEY_FILE
    if file.exists() and file.stat().st_size != KEY_SIZE:
        logger.warning("%s is no key; another is made, and addresses that were signed are not good any more", file)
        file.unlink()
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{KEY_FILE}-{secrets.token_hex(8)}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(KEY_SIZE))
            opened.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another was faster
            os.link(new, file)
        new.unlink()
    return file.read_bytes()


class Download(NamedTuple):
    """What an address allows."""

    path: str  # of a checkpoint
    file: str
    expires: int  # seconds since 1970


def sign(download: Download, key: bytes) -> str:
    """The last part of an address."""
    told = urlsafe_b64encode(json.dumps(download).encode()).decode().rstrip("=")
    return f"{told}.{_signature(told, key)}"


def verify(token: str, key: bytes) -> Download:
    """What it allows; `Refusal` 403 if it is not ours, or its time is over."""
    told, _, signature = token.partition(".")
    if not hmac.compare_digest(_signature(told, key).encode(), signature.encode()):
        raise Refusal(403, "this address is not signed by this server; ask for a new one")
    download = Download(*json.loads(urlsafe_b64decode(told + "=" * (-len(told) % 4))))
    if time.time() > download.expires:
        raise Refusal(403, "the time of this address is over; ask for a new one")
    return download


def _signature(told: str, key: bytes) -> str:
    return hmac.new(key, told.encode(), hashlib.sha256).hexdigest()


def files_of(folder: Path) -> list[Path]:
    """All below a folder, by name."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def tar_parts(folder: Path) -> Iterator[bytes]:
    """The files of a folder as a tar, a part at a time, so that none is ever in memory."""
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
