"""Images of trajectories as files, see `skyrl_report.run_folder`."""

from collections.abc import Iterable
from pathlib import Path

from skyrl_gym.images import EncodedImage


def write_images(folder: Path, images: Iterable[EncodedImage]) -> None:
    """Write each image into `folder`, unless its file exists. A file appears only when it is complete."""
    for image in images:
        path = folder / image.file_name
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_bytes(image.content)
            partial.replace(path)
