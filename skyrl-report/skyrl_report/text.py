"""Text of trajectories on a page, with control tokens marked and images shown in place."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import EncodedImage, read_image
from skyrl_report.run_folder import format_marker

MAX_THUMBNAILS = 16
"""Maximum number of thumbnails in one text. Later images are links in words, which keeps the page small."""

THUMBNAIL_PIXELS = 160
"""Maximum width and height of a thumbnail."""

_SPECIAL_TOKEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|</?s>|\[/?INST\]|<(start|end)_of_(turn|image)>|<fake_token_around_image>|<global-img>"
)


def show_text(text: str, images: Sequence[str], root: Path, folder: str) -> Markup:
    """Escape text, mark control tokens such as `<|im_end|>` for the stylesheet, and show images in place of markers.

    An image becomes a thumbnail that links to its file. The thumbnail is part of the page, so it is shown wherever the
    page is. Without a readable file, the marker stays.

    Args:
        text: text of a trajectory.
        images: names of the image files that it may show.
        root: folder of the page.
        folder: folder of the files, relative to the page.
    """
    names = {format_marker(name): name for name in images}
    pieces: list[str] = []
    end = n_images = 0
    for match in _SPECIAL_TOKEN.finditer(text):
        shown = None
        if (name := names.get(match[0])) is not None:
            shown = _link_image(root / folder / name, f"{folder}/{name}", has_thumbnail=n_images < MAX_THUMBNAILS)
            n_images += 1
        pieces += [text[end : match.start()], shown or Markup('<span class="token">{}</span>').format(match[0])]
        end = match.end()
    return Markup("").join([*pieces, text[end:]])  # joining escapes what is not markup


def _link_image(path: Path, address: str, *, has_thumbnail: bool) -> Markup | None:
    """Return a link to an image file, or None if the file cannot be read."""
    try:
        image = read_image(path)
    except InvalidAnswer:
        return None
    title = f"image {image.digest[:8]}, {image.width} x {image.height}"
    content: Markup | str = title
    if has_thumbnail:
        content = Markup('<img src="{}" alt="{}">').format(_make_thumbnail(image).data_url, title)
    return Markup('<a class="image" href="{}" title="{}" target="_blank">{}</a>').format(address, title, content)


def _make_thumbnail(image: EncodedImage) -> EncodedImage:
    """Return a copy with at most `THUMBNAIL_PIXELS` in each direction, in the smaller of two file formats.

    The pixels of a tiny image are enlarged by a whole number, so that a board of 50 x 50 pixels is 150 x 150.
    """
    small = image.open()
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    scale = THUMBNAIL_PIXELS // max(small.size)
    small = small.resize((scale * small.width, scale * small.height), resample=0)  # keeps the edges of pixels
    files = []
    for kind in ("PNG", "JPEG"):  # the first for drawings, the second for photos
        file = io.BytesIO()
        small.save(file, kind, optimize=True)
        files.append(file.getvalue())
    return read_image(min(files, key=len))
