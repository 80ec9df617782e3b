from collections.abc import Iterator
from typing import cast

import numpy as np
from tx_kit.fake_engine import STATE, no_images
from tx_kit.rows import request_row

from tx.tinker.backends.base import Backend
from tx.tinker.db_models import EngineState, Kind, TxRequest
from tx.tinker.engine.passes import Passes
from tx.tinker.types import Pass, PassResult
from tx.tinker.wire import codec

LIMITS = EngineState(**STATE)
DATUM = {
    "model_input": {"chunks": [{"tokens": [1]}]},
    "loss_fn_inputs": {"target_tokens": {"data": [2], "dtype": "int64"}},
}


class Careless:
    """Returns log-probs that no message can contain."""

    read_image = staticmethod(no_images)

    def compute(self, pass_: Pass) -> Iterator[PassResult | None]:
        yield PassResult(0.0, ["?"], ["?"])  # type: ignore[list-item]


class Slow:
    """Needs three slices per pass, and records whose each was."""

    read_image = staticmethod(no_images)

    def __init__(self) -> None:
        self.computed = ""

    def compute(self, pass_: Pass) -> Iterator[PassResult | None]:
        for result in (None, None, PassResult(0.0, [np.zeros(1)], [np.zeros(1)])):
            self.computed += pass_.model_id
            yield result


def request(model_id: str, owner: str = "") -> TxRequest:
    fields = {"data": [DATUM], "loss_fn": "cross_entropy"}
    payload = codec.message_from_json(model_id, None, fields, is_forward_only=False).SerializeToString()
    fields = {"request_id": ord(model_id), "owner": owner, "model_id": model_id, "payload": payload}
    return request_row(Kind.FORWARD_BACKWARD, **fields)


def test_users_and_their_models_take_turns() -> None:
    backend = Slow()
    passes = Passes(cast(Backend, backend), LIMITS, lambda _: None)
    for model_id, owner in {"a": "many", "b": "many", "c": "many", "d": "few"}.items():
        assert passes.begin(request(model_id, owner)) is None
    done = ""
    while passes:
        outcome = passes.step()
        done += "" if outcome is None else chr(outcome.request_id)
    assert backend.computed == "adbdcdabcabc"
    assert done == "dabc"
    assert passes.n_tokens == 4


def test_a_result_that_cannot_be_serialized() -> None:
    passes = Passes(cast(Backend, Careless()), LIMITS, lambda _: None)
    assert passes.begin(request("a")) is None
    outcome = passes.step()
    assert outcome is not None
    assert outcome.error is not None
    assert (passes.busy, passes.n_tokens) == (set(), 0)
