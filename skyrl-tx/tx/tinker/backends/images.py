"""Images, as far as the server knows them: which backends read them, and how large they are."""

from tx.tinker.types import ImageInput, UserError

NO_IMAGES = "the JAX backend reads no images; start the server with --backend torch and a vision-language model"


def count_pixels(backend: str, image: ImageInput) -> int:
    """Decode an image, without the model. Return its number of pixels.

    Raises:
        UserError: it cannot be decoded, or the backend reads no images.
    """
    if backend != "torch":
        raise UserError(NO_IMAGES)
    from tx.tinker.backends.torch.image_files import decode_image

    decoded = decode_image(image)
    return decoded.width * decoded.height
