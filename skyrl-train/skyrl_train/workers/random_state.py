"""The state of the process's random generators, in types that `torch.load(weights_only=True)` accepts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and PyTorch's global generators, which environments may use."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = (name, np.asarray(keys).tolist(), *rest)
    state = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
