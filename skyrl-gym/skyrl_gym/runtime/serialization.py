"""JSON encoding of values that cross between the trainer and an environment's process."""

from typing import Any

from skyrl_gym.images import EncodedImage, is_pillow_image, read_image


def to_json_value(value: Any) -> Any:
    """Convert numpy and torch values, dates, times and images for JSON. Use as `default` of `json.dumps`."""
    if isinstance(value, EncodedImage) or is_pillow_image(value):
        return read_image(value).data_url
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{value!r} cannot be written as JSON; an environment in a separate process needs JSON values")
