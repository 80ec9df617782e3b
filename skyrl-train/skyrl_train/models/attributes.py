"""Temporary attribute values."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from transformers import PreTrainedModel

P = ParamSpec("P")
T = TypeVar("T")

WINDOWS = ("sliding_window", "attention_chunk_size")
"""Configuration fields that limit attention to nearby tokens. Layers copy them under the same names."""

PROBED_WINDOW = 4
"""Window size during a probe, in tokens."""


@contextmanager
def with_attribute(owners: Collection[Any], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of all owners, and restore it when the context exits."""
    previous = [getattr(owner, name) for owner in owners]
    try:
        for owner in owners:
            setattr(owner, name, value)
        yield
    finally:
        for owner, old in zip(owners, previous, strict=True):
            setattr(owner, name, old)


def crossing_windows(
    probe: Callable[Concatenate[PreTrainedModel, P], T],
) -> Callable[Concatenate[PreTrainedModel, P], T]:
    """Decorate a model probe so that its few tokens cross sliding windows and attention chunks.

    The probe runs with windows of `PROBED_WINDOW` tokens instead of, say, 4,096. Masks and caches work the same at any
    size. If a layer stores a different value, e.g. the window + 1, the window is not reduced: the two must agree.
    """

    @wraps(probe)
    def run(model: PreTrainedModel, *args: P.args, **kwargs: P.kwargs) -> T:
        parts = {id(part): part for module in model.modules() for part in (module, getattr(module, "config", None))}
        with ExitStack() as stack:
            for name in WINDOWS:
                owners = [part for part in parts.values() if isinstance(getattr(part, name, None), int)]
                sizes = {getattr(owner, name) for owner in owners}
                if len(sizes) == 1 and max(sizes) > PROBED_WINDOW:
                    stack.enter_context(with_attribute(owners, name, PROBED_WINDOW))
            return probe(model, *args, **kwargs)

    return run
