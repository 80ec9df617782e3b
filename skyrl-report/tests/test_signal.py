from typing import Any

import pytest

from skyrl_report.signal import find_missing_signal

ADVANTAGES, NORM = "loss/avg_raw_advantages_abs", "policy/grad_norm"


@pytest.mark.parametrize(
    ("advantages", "norms", "expected"),
    [
        ([0.0, 0.0, 0.0], [0.1, 0.1, 0.1], "all advantages were 0"),
        ([0.3, 0.0, 0.0, 0.0], [0.1] * 4, "all advantages were 0"),
        ([0.3, 0.3, 0.3], [0.0, 0.0, 0.0], "the gradient was 0"),
        ([0.0, 0.0, 0.2], [0.1, 0.1, 0.1], None),
        ([0.0, 0.0], [0.0, 0.0], None),
        ([], [], None),
        ([0.0, None, 0.0, 0.0], [0.1] * 4, "all advantages were 0"),  # null stands for a NaN
    ],
)
def test_three_steps_without_a_signal_are_found(
    advantages: list[Any], norms: list[float], expected: str | None
) -> None:
    rows = [{"step": 0.0}] + [{ADVANTAGES: a, NORM: n} for a, n in zip(advantages, norms, strict=True)]
    warning = find_missing_signal(rows)
    assert warning is None if expected is None else expected in str(warning)
