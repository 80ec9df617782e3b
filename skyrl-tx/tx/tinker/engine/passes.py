"""Running passes, one per model. Users take turns, as do a user's models."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tx.tinker.backends.base import Backend
from tx.tinker.db_models import EngineState, TxRequest
from tx.tinker.engine.queue import RequestOutcome, pop_next
from tx.tinker.submission.validation import check_pass
from tx.tinker.types import PassResult, UserError
from tx.tinker.wire import codec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _RunningPass:
    """A pass and its remaining computation."""

    request: TxRequest
    parts: Iterator[PassResult | None]


class Passes:
    """All running passes."""

    def __init__(self, backend: Backend, limits: EngineState, on_gradients: Callable[[str], object]) -> None:
        """Create the loop for a backend. `on_gradients` is called with each model that gets gradients."""
        self._backend = backend
        self._limits = limits
        self._on_gradients = on_gradients
        self._running: dict[str, deque[_RunningPass]] = {}  # by user, in order of turns
        self.busy: set[str] = set()
        """Models with a running pass."""
        self.n_tokens = 0
        """Number of tokens trained on so far."""

    def __len__(self) -> int:
        return len(self.busy)

    def begin(self, request: TxRequest) -> RequestOutcome | None:
        """Begin a pass. Return its outcome if it fails immediately."""
        assert request.model_id is not None
        try:
            message = codec.message_from_bytes(request.payload)
            pass_ = codec.pass_of(message, self._backend.read_image, self._limits.max_context)
            check_pass(pass_, self._limits)  # again: the server may have accepted it before it knew the model's limits
            running = _RunningPass(request, self._backend.compute(pass_))
        except Exception as error:  # noqa: BLE001 (becomes the outcome of the request)
            return failed_outcome(request, error)
        self._running.setdefault(request.owner, deque()).append(running)
        self.busy.add(request.model_id)
        if not pass_.is_forward_only:
            self._on_gradients(request.model_id)
        return None

    def step(self) -> RequestOutcome | None:
        """Compute one slice of the next pass. Return its outcome if that was the last slice."""
        if not self._running:
            return None
        owner, waiting = pop_next(self._running)
        running = waiting.popleft()
        outcome = None
        try:
            result = next(running.parts)
            if result is not None:
                payload = codec.forward_backward_bytes(result)
                outcome = RequestOutcome(running.request.request_id or 0, payload, is_protobuf=True)
                self.n_tokens += sum(len(row) for row in result.logprobs)
        except Exception as error:  # noqa: BLE001 (an error of the backend fails this pass only)
            outcome = failed_outcome(running.request, error)
        if outcome is None:
            waiting.append(running)
        else:
            self.busy.discard(running.request.model_id or "")
        if waiting:
            self._running[owner] = waiting
        return outcome


def failed_outcome(request: TxRequest, error: Exception) -> RequestOutcome:
    """Return the outcome of a failed request. Log errors that are not the user's fault."""
    if not isinstance(error, UserError):
        logger.error("request %s (%s) failed", request.request_id, request.kind, exc_info=error)
    return RequestOutcome(request.request_id or 0, error=error)
