import pytest
from sqlalchemy import Engine as Database
from tx_kit.rows import request_row

from tx.tinker.db_models import Kind, RequestStatus, TxRequest
from tx.tinker.refusal import RefusalError
from tx.tinker.store import queries
from tx.tinker.store.database import reading, writing

MODEL = "s:train:0"


def request(kind: Kind, payload: bytes) -> TxRequest:
    return request_row(kind, model_id=MODEL, seq_id=3, payload=payload, payload_hash=queries.hash_of(payload))


def test_a_repeated_request_has_the_same_kind_and_the_same_payload(database: Database) -> None:
    with writing(database) as db:
        first = request(Kind.SAVE_WEIGHTS, b"x")
        db.add(first)
    with reading(database) as db:
        found = queries.earlier_request(db, request(Kind.SAVE_WEIGHTS, b"x"))
        assert found is not None
        assert found.request_id == first.request_id
        for other in (request(Kind.SAVE_WEIGHTS, b"y"), request(Kind.SAVE_WEIGHTS_FOR_SAMPLER, b"x")):
            with pytest.raises(RefusalError, match=f"seq_id=3 of {MODEL} was used by another request, save_weights"):
                queries.earlier_request(db, other)


def test_a_sample_that_is_done_cannot_be_cancelled(database: Database) -> None:
    samples = [request_row(status=status) for status in RequestStatus]
    with writing(database) as db:
        db.add_all(samples)
        db.flush()
        for sample in samples:
            queries.cancel_sample(db, sample.request_id or 0)
    with reading(database) as db:
        pairs = zip(RequestStatus, samples, strict=True)
        found = {status: db.get_one(TxRequest, one.request_id).status for status, one in pairs}
    assert found == {status: status for status in RequestStatus} | {RequestStatus.PENDING: RequestStatus.CANCELLED}
