"""Image files of clients. The server checks them too, so this module does not import PyTorch."""

from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import EncodedImage, read_image
from tx.tinker.types import ImageInput, UserError

FILE_STARTS = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}


def decode_image(image: ImageInput) -> EncodedImage:
    """Decode an image to check it. Pillow's decoders of other formats never see clients' data.

    Raises:
        UserError: it is not a complete PNG or JPEG file, or too large.
    """
    check_format(image)
    try:
        return read_image(image.content, formats=[image.format.upper()])
    except (InvalidAnswer, ModuleNotFoundError) as error:  # Pillow may be missing
        raise UserError(str(error)) from error


def check_format(image: ImageInput) -> None:
    """Check that an image is PNG or JPEG, and that its content begins like such a file.

    Raises:
        UserError: it has another format or content.
    """
    if image.format not in FILE_STARTS:
        raise UserError(f"an image has format={image.format!r}; use {' or '.join(FILE_STARTS)}")
    if not image.content.startswith(FILE_STARTS[image.format]):
        raise UserError(
            f"an image has format={image.format!r}, but its {len(image.content)} bytes are not a {image.format} file; "
            "send the bytes of a PNG or JPEG file with its format"
        )
