"""The state of a process's random generators, in types that `torch.load(weights_only=True)` accepts."""

import random
from typing import Any

import numpy as np
import torch


def random_state(device: str = "cpu") -> dict[str, Any]:
    """Return the state of Python's, NumPy's, PyTorch's and `device`'s global generators, which environments may use."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = (name, np.asarray(keys).tolist(), *rest)
    state = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if torch.device(device).type == "cuda" else {})


def set_random_state(state: dict[str, Any], device: str = "cpu") -> None:
    """Restore a state from `random_state`. The device may have another index than the one that saved it.

    Old checkpoints have a list with the states of all GPUs that the saving process could see.
    """
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.device(device).type == "cuda":
        saved = state["cuda"]
        if isinstance(saved, list):
            saved = saved[min(torch.device(device).index or 0, len(saved) - 1)]
        torch.cuda.set_rng_state(saved, device)
