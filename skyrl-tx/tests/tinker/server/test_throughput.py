from types import SimpleNamespace

import pytest

from tx.tinker.server.throughput import MAX_POINTS, Throughput, polyline


def test_rates_cover_half_an_hour() -> None:
    clock = SimpleNamespace(now=0.0)
    seen = Throughput(lambda: clock.now)
    for clock.now, trained in ((0.0, 0), (10.0, 100), (30.0, 500), (40.0, 50), (50.0, 60)):  # restarted at 40
        seen.record({"tokens_trained": trained, "pid": 7, "models": ["m"]})
    assert seen.rates("tokens_trained") == [10, 20, 0, 1]
    assert seen.rates("tokens_sampled") == [0, 0, 0, 0]
    assert seen.seconds == 50
    for number in range(MAX_POINTS + 50):
        clock.now = 60 + 10.0 * number
        seen.record({"tokens_sampled": number})
    assert len(seen.rates("tokens_sampled")) == MAX_POINTS - 1
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
