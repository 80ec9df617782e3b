from typing import Any

import pytest

from skyrl_gym.tools.screen import Screen


def test_points_become_pixels() -> None:
    pixels, thousandths = Screen(640, 480), Screen(640, 480, "thousandths")
    assert [pixels.to_pixels(point) for point in ([0, 0], [320.7, 200], (640, 480))] == [(0, 0), (320, 200), (639, 479)]
    points = [[0, 0], [500, 250], [1000, 1000]]
    assert [thousandths.to_pixels(point) for point in points] == [(0, 0), (320, 120), (639, 479)]
    assert "thousandths" in thousandths.description
    assert "in pixels" in pixels.description


@pytest.mark.parametrize(
    "point", [None, "3, 4", [3], [3, 4, 5], [True, 4], ["3", 4], [float("nan"), 4], [3, float("inf")]]
)
def test_other_values_are_refused(point: Any) -> None:
    with pytest.raises(ValueError, match="must be two numbers"):
        Screen(640, 480).to_pixels(point)


@pytest.mark.parametrize("point", [[-1, 0], [641, 0], [0, 481]])
def test_points_outside_are_refused(point: list[int]) -> None:
    with pytest.raises(ValueError, match="outside the screenshot; x is at most 640 and y at most 480"):
        Screen(640, 480).to_pixels(point)
