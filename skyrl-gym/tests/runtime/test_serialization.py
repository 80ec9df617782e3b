from __future__ import annotations

import json
from datetime import datetime

import numpy as np
import pytest

from skyrl_gym.runtime.serialization import to_json_value


def test_arrays_numbers_and_dates_are_encoded() -> None:
    answer = {"at": datetime(2026, 1, 2), "many": np.arange(2), "one": np.float32(0.5)}
    assert json.loads(json.dumps(answer, default=to_json_value)) == {
        "at": "2026-01-02T00:00:00",
        "many": [0, 1],
        "one": 0.5,
    }


def test_unsupported_value_is_named() -> None:
    with pytest.raises(TypeError, match=r"<object object at .* cannot be written as JSON"):
        json.dumps([object()], default=to_json_value)
