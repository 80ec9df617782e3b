"""A local copy of a run folder in remote storage, so that all readers work on local files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from skyrl_report.errors import DataError
from skyrl_report.remote import STORAGE_ERRORS, RemoteFolder
from skyrl_report.run_folder import RunFolder

LEFT_OUT = {"ckpts", "export", "wandb", "tensorboard"}
"""Folders that no reader needs."""


class Mirror:
    """A local copy that `update` brings up to date. The remote folder is a run folder, or the folder of its `evals`."""

    def __init__(self, remote: RemoteFolder, local: Path) -> None:
        self._remote = remote
        self._local = local
        self._sizes: dict[str, int] = {}

    def update(self) -> None:
        """Download the files whose size has changed. Raise DataError if the folder cannot be read."""
        try:
            for name, size in self._remote.sizes().items():
                first = PurePosixPath(name).parts[0]
                if first in LEFT_OUT or self._sizes.get(name) == size or ".." in PurePosixPath(name).parts:
                    continue
                is_evaluation = first.startswith("global_step_") or first == "images"
                self._remote.download_file(name, self._local / ("evals" if is_evaluation else "") / name)
                self._sizes[name] = size
        except STORAGE_ERRORS as error:
            raise DataError(f"cannot read {self._remote.url}: {error!r}; check the URL and the credentials") from error
        if not self._sizes:
            raise DataError(f"{self._remote.url} has no files; pass the folder of a run")


@contextmanager
def open_run(source: str) -> Iterator[tuple[RunFolder, Mirror | None]]:
    """Open a run folder within the context: a local path as it is, and a URL as a temporary copy with its mirror.

    Raises:
        DataError: the folder does not exist or cannot be read.
    """
    if "://" not in source:
        if not Path(source).is_dir():
            raise DataError(f"{source} is not a folder; pass the folder of a run, e.g. outputs/skyrl/my-run")
        yield RunFolder(Path(source)), None
        return
    with TemporaryDirectory(prefix="skyrl-watch-") as folder:
        parts = [part for part in source.partition("://")[2].split("/") if part]
        local = Path(folder, *parts[-2:])  # its names are the project and the run on the page
        local.mkdir(parents=True)
        mirror = Mirror(RemoteFolder(source), local)
        mirror.update()
        yield RunFolder(local), mirror
