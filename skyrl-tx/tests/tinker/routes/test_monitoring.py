import re
from collections.abc import Iterator
from datetime import timedelta
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from tx_kit.servers import Running, result_of, serving

from tx.tinker.db_models import EngineState, now
from tx.tinker.routes.monitoring import format_duration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path / "state") as running:
        yield running


class Words(HTMLParser):
    """The text of a page. Checks that all elements are closed."""

    EMPTY = frozenset({"meta", "link", "polyline"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def words_of(url: str, **headers: str) -> str:
    reply = httpx.get(url, headers=headers)
    assert reply.status_code == 200
    return re.sub(r"\s+", " ", " ".join(Words(reply.text).words))


def test_a_page_with_objects(server: Running) -> None:
    model = server.model()
    server.fails_with = ("<b>out of memory</b>", "server")
    with server.client() as http:
        assert "error" in result_of(http, http.post("optim_step", json={"model_id": model, "adam_params": {}}))
    server.set(EngineState, 1, status={"tokens_trained": 1234567, "models": []})
    words = words_of(server.url)
    assert "Engine up for" in words
    assert f"skyrl-tx {version('skyrl-tx')}, server up for" in words
    assert "1 / 64 models under training 1 sessions 0 requests waiting" in words
    assert f"{model} ready 4" in words
    assert "<my run>" in words
    assert re.search(r"create_model 0 1 \d\.\d\d s", words)
    assert re.search(rf"optim_step {model} server <b>out of memory</b>", words)
    assert "tokens trained 1,234,567" in words


def test_users_see_only_their_own_objects(tmp_path: Path) -> None:
    keys = tuple(map(SecretStr, ("tml-alice", "tml-bob")))
    with serving(tmp_path / "state", api_keys=keys) as server:
        alice, bob = ({"X-API-Key": key.get_secret_value()} for key in keys)
        of_alice, of_bob = server.model(**alice), server.model(**bob)
        for headers, own, other in ((alice, of_alice, of_bob), (bob, of_bob, of_alice)):
            words = words_of(server.url, **headers)
            assert own in words
            assert other.partition(":")[0] not in words
            assert "2 / 64 models under training" in words


def test_an_engine_that_is_silent_is_not_up(server: Running) -> None:
    server.set(EngineState, 1, last_seen_at=now() - timedelta(minutes=1))
    assert "Engine not up" in words_of(server.url)
    assert "tx_engine_up 0.0" in httpx.get(f"{server.url}/metrics").text


def test_metrics_for_prometheus(server: Running) -> None:
    server.model()
    reply = httpx.get(f"{server.url}/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    families = {one.name: one for one in text_string_to_metric_families(reply.text)}
    assert {"tx_http_requests", "tx_requests_finished", "tx_models", "tx_engine_up", "tx_build_info"} <= set(families)
    assert all(one.documentation and one.name.startswith("tx_") for one in families.values())
    assert [one.value for one in families["tx_models"].samples] == [1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "0 s"), (0.9, "0 s"), (59, "59 s"), (60, "1 min"), (3725, "1 h 2 min"), (90061, "1 d 1 h"), (86400, "1 d")],
)
def test_durations(seconds: float, words: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == words
