"""Passes on their way: one of each model at a time. Users take turns, and the models of each."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tx.tinker.backends.base import Backend
from tx.tinker.db_models import EngineState, Request
from tx.tinker.engine.queue import Outcome, pop_first
from tx.tinker.types import PassResult, UserError
from tx.tinker.validation import check_pass
from tx.tinker.wire import codec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    """A pass, and what is left of it."""

    request: Request
    parts: Iterator[PassResult | None]


class Passes:
    """All of them."""

    def __init__(self, backend: Backend, limits: EngineState, on_gradients: Callable[[str], object]) -> None:
        """`on_gradients` is told which model is going to have some."""
        self._backend = backend
        self._limits = limits
        self._on_gradients = on_gradients
        self._running: dict[str, deque[_Running]] = {}  # by user, in the order of their turns
        self.busy: set[str] = set()
        """Models that have a pass under way."""
        self.n_tokens = 0
        """Trained on so far."""

    def __len__(self) -> int:
        return len(self.busy)

    def begin(self, request: Request) -> Outcome | None:
        """Begin a pass; its outcome if it cannot."""
        assert request.model_id is not None
        try:
            asked = codec.pass_of(codec.message_from_bytes(request.payload))
            check_pass(asked, self._limits)  # again: the server may not have known the model's limits
            running = _Running(request, self._backend.compute(asked))
        except Exception as error:  # noqa: BLE001 (it is what came of the request)
            return failed(request, error)
        self._running.setdefault(request.owner, deque()).append(running)
        self.busy.add(request.model_id)
        if not asked.is_forward_only:
            self._on_gradients(request.model_id)
        return None

    def step(self) -> Outcome | None:
        """Compute a part of the pass whose turn it is; its outcome if that was the last."""
        if not self._running:
            return None
        owner, row = pop_first(self._running)
        one = row.popleft()
        outcome = self._compute_part(one)
        if outcome is None:
            row.append(one)
        else:
            self.busy.discard(one.request.model_id or "")
        if row:
            self._running[owner] = row
        return outcome

    def _compute_part(self, one: _Running) -> Outcome | None:
        try:
            result = next(one.parts)
            told = None if result is None else codec.forward_backward_bytes(result)
        except Exception as error:  # noqa: BLE001 (a mistake of the backend costs this pass, and not the engine)
            return failed(one.request, error)
        if result is None or told is None:
            return None
        self.n_tokens += sum(len(row) for row in result.logprobs)
        return Outcome(one.request.request_id or 0, told, is_protobuf=True)


def failed(request: Request, error: Exception) -> Outcome:
    """What raised is what came of it; our own mistakes are in the log, too."""
    if not isinstance(error, UserError):
        logger.error("request %s (%s) failed", request.request_id, request.kind, exc_info=error)
    return Outcome(request.request_id or 0, error=error)
