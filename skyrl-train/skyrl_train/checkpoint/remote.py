"""Checkpoints in remote storage: S3, or any fsspec file system.

<url>/<project>/<model>/<run_name>/
    latest_ckpt_global_step.txt     the run's latest step. Later folders are from before it resumed at an earlier step
    global_step_N/                  the files of a checkpoint. `checksums.json` is written last and makes it complete

Object stores cannot rename folders, so writing `checksums.json` replaces the rename in `store`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from skyrl_report.remote import S3_SCHEMES, RemoteFolder
from skyrl_report.run_folder import parse_steps
from skyrl_train.checkpoint.manifest import MANIFEST, parse_manifest
from skyrl_train.checkpoint.store import POINTER, describe_fix, step_of
from skyrl_train.errors import CheckpointError

logger = logging.getLogger(__name__)


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
