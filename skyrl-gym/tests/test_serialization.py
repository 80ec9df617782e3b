from __future__ import annotations

import json
from datetime import datetime

import numpy as np
import pytest

from skyrl_gym.serialization import plain


def test_arrays_numbers_and_times_have_json() -> None:
    answer = {"at": datetime(2026, 1, 2), "many": np.arange(2), "one": np.float32(0.5)}
    assert json.loads(json.dumps(answer, default=plain)) == {"at": "2026-01-02T00:00:00", "many": [0, 1], "one": 0.5}


def test_what_has_no_json_is_named() -> None:
    with pytest.raises(TypeError, match=r"<object object at .* has no JSON"):
        json.dumps([object()], default=plain)
