import pytest

from skyrl_report.series import Series, distinct, format_value, read_series


def test_a_repeated_step_has_its_newest_value() -> None:
    rows = [{"step": 0, "a": 1.0}, {"step": 2, "a": None}, {"step": 1, "b": 5.0}, {"step": 0, "a": 3.0}]
    series = read_series(rows, "a")
    assert (series.steps, series.values) == ((0, 2), (3.0, None))
    assert (series.first, series.last, series.n_not_finite) == (3.0, 3.0, 1)
    assert not read_series([{"step": 1, "a": None}], "a")
    assert not read_series([{"step": 1}], "a")


def test_nan_or_infinite_values_are_gaps() -> None:
    series = Series("a", (1, 2, 3, 4), (1.0, 2.0, None, 4.0))
    assert series.runs() == [[(1, 1.0), (2, 2.0)], [(4, 4.0)]]


def test_smoothing_is_the_mean_of_a_centered_window_and_keeps_constants_gaps_and_short_series() -> None:
    long = Series("a", tuple(range(100)), tuple(None if i == 50 else 2.0 for i in range(100)))
    assert long.smoothed() == long
    short = Series("a", (1, 2, 3), (1.0, 9.0, 2.0))
    assert short.smoothed() == short
    series = Series("a", tuple(range(40)), tuple(float(i == 20) for i in range(40)))
    assert series.smoothed().values[18:23] == (0.2, 0.2, 0.2, 0.2, 0.2)
    assert sum(series.smoothed().finite) == pytest.approx(1.0)


def test_distinct_drops_empty_and_repeated_series_in_order() -> None:
    one, repeated = Series("eval/all/b", (1,), (1.0,)), Series("eval/catch/b", (1,), (1.0,))
    same_values, other = Series("eval/all/a", (1,), (1.0,)), Series("eval/math/b", (1,), (2.0,))
    assert distinct([other, one, repeated, same_values, Series("d", (), ())]) == [other, one, same_values]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("eval/environment/catch_rate", 0.975, "97.5%"),
        ("eval/all/pass_at_4", 1.0, "100%"),
        ("policy/policy_kl", 0.0, "0"),
        ("policy/policy_kl", 0.0213456, "0.0213"),
        ("policy/policy_lr", 2.5e-4, "2.5e-4"),
        ("policy/policy_lr", -1e-6, "-1e-6"),
        ("trainer/tokens_per_second", 4338.4, "4,338"),
    ],
)
def test_numbers_are_formatted_for_people(name: str, value: float, text: str) -> None:
    assert format_value(name, value) == text
