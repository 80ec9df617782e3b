"""Prometheus metrics, served at /metrics."""

from collections import OrderedDict
from collections.abc import Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from tx.tinker.db_models import Kind, RequestStatus, TxRequest
from tx.tinker.wire import tinker_pb2 as pb

BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
MAX_REMEMBERED = 1 << 16


class ServerMetrics:
    """A server's metrics."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        http_labels = ["endpoint", "method", "status"]
        self.http_requests = Counter("tx_http_requests", "HTTP requests answered.", http_labels, registry=registry)
        self.http_seconds = Histogram(
            "tx_http_seconds", "Time to answer.", ["endpoint"], buckets=BUCKETS, registry=registry
        )
        self.accepted = Counter(
            "tx_requests_accepted", "Requests accepted for the engine.", ["kind"], registry=registry
        )
        fetched = "Requests whose result was first fetched."
        self.finished = Counter("tx_requests_finished", fetched, ["kind", "status"], registry=registry)
        self.seconds = Histogram(
            "tx_request_seconds", "From acceptance to result.", ["kind"], buckets=BUCKETS, registry=registry
        )
        counted = "Tokens of accepted passes and prompts, and of fetched samples."
        self.tokens = Counter("tx_tokens", counted, ["of"], registry=registry)
        self.pending = Gauge("tx_requests_pending", "Pending requests.", ["kind"], registry=registry)
        self.waiting = Gauge("tx_polls_held", "Held polls of clients.", registry=registry)
        self.models = Gauge("tx_models", "Models under training.", registry=registry)
        Info("tx_build", "What is running.", registry=registry).info({"version": version("skyrl-tx")})
        self.engine_up = Gauge("tx_engine_up", "1 if the engine has reported recently.", registry=registry)
        self.engine = Gauge("tx_engine", "Counters of the engine.", ["of"], registry=registry)
        self._seen: OrderedDict[int, None] = OrderedDict()

    def count_finished(self, request: TxRequest) -> None:
        """Count a finished request the first time its result is fetched."""
        assert request.request_id is not None
        if request.request_id in self._seen:
            return
        self._seen[request.request_id] = None
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)
        self.finished.labels(request.kind, request.status).inc()
        if request.completed_at is not None:
            self.seconds.labels(request.kind).observe((request.completed_at - request.created_at).total_seconds())
        if request.kind is Kind.SAMPLE and request.status is RequestStatus.DONE:
            sequences = pb.SampleResponse.FromString(request.result or b"").sequences
            self.tokens.labels("sampled").inc(sum(len(sequence.tokens) // 4 for sequence in sequences))

    def to_text(
        self,
        pending: Mapping[Kind, int],
        n_waiting: int,
        n_models: int,
        counts: Mapping[str, object],
        *,
        is_engine_up: bool,
    ) -> bytes:
        """Render the metrics in Prometheus format, including the integers in `counts`, an `EngineState.status`."""
        self.models.set(n_models)
        for kind in Kind:
            self.pending.labels(kind).set(pending.get(kind, 0))
        self.waiting.set(n_waiting)
        for name, count in counts.items():
            if isinstance(count, int):
                self.engine.labels(name).set(count)
        self.engine_up.set(is_engine_up)
        return generate_latest(self.registry)
