"""The global generators of `random` and numpy, lent to code that draws from them, and taken back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lent = threading.RLock()


class OwnRandom:
    """Generators of one episode: what it draws depends on its seed alone, and nobody else's numbers change.

    All who use this take turns, since there is one global generator. Do nothing in it that waits.
    """

    def __init__(self, seed: int | None) -> None:
        """Without a seed, every episode differs."""
        import numpy as np

        self._states: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(None if seed is None else seed % 2**32).get_state(),
        )

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While this lasts, the global generators go on where the last one left off."""
        import numpy as np

        with _lent:
            outer = random.getstate(), np.random.get_state()
            _set(self._states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set(outer)


def _set(states: tuple[Any, Any]) -> None:
    import numpy as np

    random.setstate(states[0])
    np.random.set_state(states[1])
