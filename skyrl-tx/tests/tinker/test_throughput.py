from __future__ import annotations

import pytest

from tx.tinker.throughput import MOST_POINTS, Throughput, polyline


class Clock:
    """That the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rates() -> None:
    clock = Clock()
    seen = Throughput(clock)
    for clock.now, trained in ((0.0, 0), (10.0, 100), (30.0, 500), (40.0, 50), (50.0, 60)):  # started anew at 40
        seen.note({"tokens_trained": trained, "pid": 7, "models": ["m"]})
    assert seen.rates("tokens_trained") == [10, 20, 0, 1]
    assert seen.rates("tokens_sampled") == [0, 0, 0, 0]
    assert seen.seconds == 50


def test_before_there_is_anything() -> None:
    seen = Throughput(Clock())
    assert (seen.rates("tokens_trained"), seen.seconds) == ([], 0)
    seen.note({})
    assert seen.rates("tokens_trained") == []


def test_it_looks_back_half_an_hour() -> None:
    clock = Clock()
    seen = Throughput(clock)
    for number in range(MOST_POINTS + 50):
        clock.now = 10.0 * number
        seen.note({"tokens_sampled": number})
    assert len(seen.rates("tokens_sampled")) == MOST_POINTS - 1
    assert seen.seconds == 1800


@pytest.mark.parametrize(
    ("values", "points"),
    [
        ([], ""),
        ([5.0], "0.0,0.0"),
        ([0.0, 0.0], "0.0,30.0 180.0,30.0"),
        ([1.0, 4.0, 2.0], "0.0,22.5 90.0,0.0 180.0,15.0"),
    ],
)
def test_lines(values: list[float], points: str) -> None:
    assert polyline(values, 180, 30) == points
