from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from tx.tinker.backends.base import Backend
from tx.tinker.db_models import EngineState, Kind, Request
from tx.tinker.engine.passes import Passes
from tx.tinker.types import Pass, PassResult
from tx.tinker.wire import codec

LIMITS = EngineState(base_model="m", vocab_size=9, max_context=9, eos_ids=[], can_train_all=False, has_tokenizer=False)
DATUM = {
    "model_input": {"chunks": [{"tokens": [1]}]},
    "loss_fn_inputs": {"target_tokens": {"data": [2], "dtype": "int64"}},
}


class Careless:
    """Has log-probs that no message can hold."""

    def compute(self, asked: Pass) -> Iterator[PassResult | None]:
        yield PassResult(0.0, ["?"], ["?"])  # type: ignore[list-item]


def test_a_result_that_cannot_be_told() -> None:
    told = {"data": [DATUM], "loss_fn": "cross_entropy"}
    payload = codec.message_from_json("a", None, told, is_forward_only=False).SerializeToString()
    passes = Passes(cast(Backend, Careless()), LIMITS, lambda _: None)
    request = Request(request_id=1, kind=Kind.FORWARD_BACKWARD, model_id="a", payload=payload, payload_hash="")
    assert passes.begin(request) is None
    outcome = passes.step()
    assert outcome is not None
    assert outcome.error is not None
    assert (passes.busy, passes.n_tokens) == (set(), 0)
