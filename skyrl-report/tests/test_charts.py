from xml.etree import ElementTree

import pytest

from skyrl_report.charts import Chart, Line, sparkline
from skyrl_report.series import Series


def _elements(chart: Chart, tag: str, css_class: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(chart.svg())
    return [element for element in root.iter(tag) if css_class in element.attrib.get("class", "").split()]


def _chart(*values: float | None, style: str = "eval", baselines: dict[str, float] | None = None) -> Chart:
    series = Series("a", tuple(range(len(values))), values)
    return Chart("A <chart>", "", [Line("evaluation", series, style)], baselines or {})


def test_every_point_is_on_the_line_in_order_and_has_its_value_as_title() -> None:
    chart = _chart(0.0, 0.5, 1.0)
    (path,) = _elements(chart, "path", "line")
    assert path.attrib["d"].count("L") == 2
    dots = _elements(chart, "circle", "dot")
    assert [dot.findtext("title") for dot in dots] == ["step 0: 0", "step 1: 0.5", "step 2: 1"]
    (left, low), (middle, half), (right, high) = ((float(d.attrib["cx"]), float(d.attrib["cy"])) for d in dots)
    assert left < middle < right
    assert low > half > high
    for values in ((3.0,), (0.0, 0.0, 0.0)):
        assert len(_elements(_chart(*values), "circle", "dot")) == len(values)
    root = ElementTree.fromstring(sparkline(Series("a", (5,), (1.0,))))
    assert root.tag == "svg"


def test_missing_values_are_gaps_with_a_warning() -> None:
    chart = _chart(0.0, None, None, 1.0)
    (path,) = _elements(chart, "path", "line")
    assert path.attrib["d"].count("M") == 2
    assert chart.warning == "2 values are NaN or infinite: a gap in the line"
    assert _chart(0.0, 1.0).warning == ""


def test_a_share_is_drawn_from_0_to_100_percent() -> None:
    chart = Chart("Rate", "", [Line("", Series("eval/environment/catch_rate", (0, 1), (0.0, 0.0)), "eval")])
    ticks = [element.text for element in _elements(chart, "text", "tick")]
    assert ticks[0] == "0%"
    assert "100%" in ticks


@pytest.mark.parametrize("values", [(5.6259, 5.6261), (115.52, 115.71), (12_345.0, 12_345.2), (1e-6, 1.000001e-6)])
def test_ticks_of_a_narrow_range_differ_and_are_inside_the_chart(values: tuple[float, ...]) -> None:
    ticks = _elements(_chart(*values), "text", "tick")
    heights = [tick.text for tick in ticks if tick.attrib["text-anchor"] == "end"]
    assert len(set(heights)) == len(heights) > 2
    assert all(float(tick.attrib["x"]) > 6 * len(str(tick.text)) for tick in ticks if tick.text in heights)
    assert [tick.text for tick in ticks][len(heights) :] == ["step 0", "1"]


def test_a_baseline_outside_the_values_is_inside_the_chart() -> None:
    chart = _chart(0.0, 0.1, baselines={"optimal": 1.0})
    (line,) = _elements(chart, "line", "baseline")
    assert 0 < float(line.attrib["y1"]) < 190
    assert "optimal 1" in "".join(ElementTree.fromstring(chart.svg()).itertext())


def test_a_long_line_keeps_its_peaks_in_a_bounded_path() -> None:
    values = [0.1 * (i % 7) for i in range(50_000)]
    values[31_415], values[27_182] = 9.0, -9.0
    (short,), (long,) = (_elements(_chart(*values[::step], style="raw"), "path", "line") for step in (500, 1))
    points = [tuple(map(float, point.split())) for point in long.attrib["d"][1:].split("L")]
    assert len(points) < 4 * 340
    assert points == sorted(points, key=lambda point: point[0])
    highest, lowest = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
    assert highest[0] > lowest[0]
    assert highest[1] < 30 < 150 < lowest[1]
    assert len(short.attrib["d"].split("L")) == 100
