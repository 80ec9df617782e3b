"""Images of trajectories as files.

    evals/global_step_5/catch.jsonl     … <|image:0b1f2c3d|>Where is the ball? …
    evals/images/0b1f2c3d….png

A row of a trajectory lists its image files. In its text, a marker with the first digits of the file's name replaces the
placeholder tokens of an image. The model never sees these digits, so it cannot write the marker of an image.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from skyrl_gym.images import EncodedImage

IMAGE_FOLDER = "images"
"""Folder of the files, beside the files or folders of the steps."""

FILE_NAME = re.compile(r"[0-9a-f]{32}\.[a-z0-9]+")


def write_images(folder: Path, images: Iterable[EncodedImage]) -> None:
    """Write each image into `folder`, unless its file exists. A file appears only when it is complete."""
    for image in images:
        path = folder / image.file_name
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_bytes(image.content)
            partial.replace(path)


def format_marker(file_name: str) -> str:
    """Return the marker of an image in the text of a trajectory."""
    return f"<|image:{file_name[:8]}|>"
