"""Points on a screenshot, as models write them."""

import math
from dataclasses import dataclass
from typing import Any, Literal

Coordinates = Literal["pixels", "thousandths"]
"""Units of a model's coordinates. Qwen2.5-VL writes pixels, Qwen3-VL thousandths of the width and height."""


@dataclass(frozen=True, slots=True)
class Screen:
    """The size of a screenshot in pixels, and the unit of the model's coordinates."""

    width: int
    height: int
    coordinates: Coordinates = "pixels"

    @property
    def description(self) -> str:
        """A sentence for the model."""
        size = f"The screenshot has {self.width} x {self.height} pixels."
        if self.coordinates == "pixels":
            return f"{size} A coordinate [x, y] is in pixels from its top left corner."
        return f"{size} A coordinate [x, y] is in thousandths of its width and height, from its top left corner."

    def to_pixels(self, coordinate: Any) -> tuple[int, int]:
        """Return the pixel at a coordinate. Raise ValueError, with a message for the model, if there is none.

        >>> Screen(640, 480, "thousandths").to_pixels([500, 1000])
        (320, 479)
        """
        is_point = isinstance(coordinate, list | tuple) and len(coordinate) == 2 and all(map(_is_finite, coordinate))
        if not is_point:
            raise ValueError(f"coordinate={coordinate!r} must be two numbers, [x, y]")
        size = self.width, self.height
        limits = size if self.coordinates == "pixels" else (1000, 1000)
        if not all(0 <= value <= limit for value, limit in zip(coordinate, limits, strict=True)):
            raise ValueError(
                f"coordinate={list(coordinate)} is outside the screenshot; x is at most {limits[0]} and y at most "
                f"{limits[1]}"
            )
        x, y = (
            min(int(value * length / limit), length - 1)
            for value, length, limit in zip(coordinate, size, limits, strict=True)
        )
        return x, y


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
