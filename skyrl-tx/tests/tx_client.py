"""Shorthands for the real client."""

from __future__ import annotations

from typing import Any

import numpy as np
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
PROMPT = types.ModelInput.from_ints([5, 6, 7])


def datum(n_tokens: int = 3, **inputs: Any) -> types.Datum:
    tokens = list(range(1, n_tokens + 1))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": np.array(tokens), **inputs}
    )


def weighted_datum() -> types.Datum:
    return datum(weights=np.array([0, 1, -2.5], np.float32))
