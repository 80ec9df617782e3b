"""Values and texts that tempt parsers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

N_CHARS = 1 << 18  # a quadratic parser takes minutes for them

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}', "\n", "\ud800", "\0")
TAGGED_TEXTS = st.lists(st.sampled_from(TAGS) | st.text(max_size=5), max_size=12).map("".join)


def long_text(unit: str) -> str:
    """Repeat a text until it has `N_CHARS` characters."""
    return unit * (N_CHARS // len(unit))


@contextmanager
def linear_time() -> Iterator[None]:
    """Fail if the block uses 5 s of this process: far above a linear cost of long texts, far below a quadratic one."""
    started = time.process_time()
    yield
    assert time.process_time() - started < 5
