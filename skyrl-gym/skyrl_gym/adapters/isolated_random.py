"""Temporary replacement of the global random state, for code that uses the global generators."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.RLock()


class IsolatedRandom:
    """The random state of an episode. It depends only on the seed and does not affect other code.

    Only one episode can be active at a time, because there is one global state, so do not wait for anything while it is
    active.
    """

    def __init__(self, seed: int | None) -> None:
        """Seed the state of `random` and numpy. Without a seed, every episode differs."""
        import numpy as np

        self._states: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(None if seed is None else seed % 2**32).get_state(),
        )

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Swap this episode's state into the global generators for the duration of the block."""
        import numpy as np

        with _lock:
            outer = random.getstate(), np.random.get_state()
            _set_global_state(self._states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set_global_state(outer)


def _set_global_state(states: tuple[Any, Any]) -> None:
    import numpy as np

    random.setstate(states[0])
    np.random.set_state(states[1])
