from datetime import timedelta
from importlib.metadata import version
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tx_kit.rows import request_row

from tx.tinker.db_models import Kind, RequestStatus, TxRequest, now
from tx.tinker.server import metrics as module
from tx.tinker.server.metrics import ServerMetrics
from tx.tinker.types import Sample, SampleResult
from tx.tinker.wire.codec import sample_bytes

THREE = sample_bytes(
    SampleResult([Sample([1, 2], [-1.0, -1.0], is_stopped=True), Sample([3], [-1.0], is_stopped=False)])
)


def done(request_id: int, **fields: Any) -> TxRequest:
    times = {"created_at": now() - timedelta(seconds=3), "completed_at": now()}
    return request_row(**({"request_id": request_id, "status": RequestStatus.DONE, "result": THREE} | times | fields))


def numbers(metrics: ServerMetrics, **values: Any) -> dict[tuple[str, ...], float]:
    """Return values by name and labels, as Prometheus reads them."""
    arguments = {"pending": {}, "n_waiting": 0, "n_models": 0, "counts": {}, "is_engine_up": True, **values}
    families = text_string_to_metric_families(metrics.to_text(**arguments).decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_results_are_counted_once() -> None:
    metrics = ServerMetrics()
    for _ in range(3):
        metrics.count_finished(done(1))
    metrics.count_finished(done(2, status=RequestStatus.FAILED, result=None))
    metrics.count_finished(done(3, kind=Kind.OPTIM_STEP, result=b"{}"))
    found = numbers(metrics)
    assert found["tx_requests_finished_total", "sample", "done"] == 1
    assert found["tx_requests_finished_total", "sample", "failed"] == 1
    assert found["tx_tokens_total", "sampled"] == 3
    assert found["tx_request_seconds_count", "sample"] == 2
    assert found["tx_request_seconds_bucket", "sample", "2.5"] == 0
    assert found["tx_request_seconds_bucket", "sample", "5.0"] == 2


def test_the_memory_of_counted_results_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    metrics = ServerMetrics()
    for request_id in (1, 2, 3, 1):
        metrics.count_finished(done(request_id))
    assert numbers(metrics)["tx_requests_finished_total", "sample", "done"] == 4
    assert len(metrics._seen) == 2


def test_gauges() -> None:
    metrics = ServerMetrics()
    found = numbers(metrics, pending={Kind.SAMPLE: 5}, n_waiting=2, n_models=4, counts={"sampling": 3, "models": ["m"]})
    assert found["tx_requests_pending", "sample"] == 5
    assert found["tx_requests_pending", "optim_step"] == 0
    assert (found["tx_polls_held",], found["tx_engine_up",]) == (2, 1)
    assert found["tx_engine", "sampling"] == 3
    assert found["tx_models",] == 4
    assert found["tx_build_info", version("skyrl-tx")] == 1
    assert ("tx_engine", "models") not in found
    assert numbers(metrics, is_engine_up=False)["tx_engine_up",] == 0
    assert numbers(metrics)["tx_requests_pending", "sample"] == 0
