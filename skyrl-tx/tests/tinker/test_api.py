"""The server as a process, with what people and Prometheus see; and requests that nobody would write."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tx_postgresql import url_for
from tx_server import BASE_MODEL, CHILD_ENVIRONMENT, Running, serving

SAMPLE = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "base_model": BASE_MODEL}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("state"), hold_sec=0.05) as running:
        yield running


def test_the_page_shows_what_users_wrote_as_text(server: Running) -> None:
    with server.client() as http:
        http.post("create_session", json={"tags": [], "display_name": "<script>alert(1)</script>"})
        server.fails_with = ("<b>no</b>", "server")
        promise = http.post("asample", json=SAMPLE).json()
        while "type" in http.post("retrieve_future", json=promise).json():
            pass
        server.fails_with = None
    page = httpx.get(server.url).text
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert "Engine up" in page
    assert "http://" not in page.replace(server.url, "")
    assert "https://" not in page


def test_numbers(server: Running) -> None:
    with server.client() as http:
        promise = http.post("asample", json={**SAMPLE, "num_samples": 3}).json()
        for _ in range(3):
            while "type" in (found := http.post("retrieve_future", json=promise).json()) and "sequences" not in found:
                pass
        http.get("training_runs/nobody:train:0")
    text = httpx.get(f"{server.url}/metrics").text
    assert re.search(r'tx_requests_finished_total\{kind="sample",status="done"\} 1\.0', text)
    assert 'tx_tokens_total{of="sampled"} 3.0' in text
    assert 'tx_requests_pending{kind="sample"} 0.0' in text
    assert "tx_engine_up 1.0" in text
    assert re.search(r'endpoint="[^"]*/training_runs/\{run_id\}",method="GET",status="404"', text)
    assert "nobody" not in text


def test_paths_that_are_none(server: Running) -> None:
    for path in ("/api/v1/nonsense", "/favicon.ico", "/api/v1/training_runs/a%00b", "/api/v1/sessions/%ff"):
        found = httpx.get(server.url + path)
        assert found.status_code == 404
        assert found.json()["detail"]
    with server.client() as http:
        bare = http.delete("training_runs/a:train:0/checkpoints/0001")
        assert bare.status_code == 400
        assert "weights/<name>" in bare.text
        assert http.delete("training_runs/a:train:0/checkpoints/weights/..%2f..%2fx").status_code == 400
        assert http.get("downloads/forged.token/file").status_code == 403


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-2, 5),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["\0", "\ud800", BASE_MODEL, "tinker://a:train:0/weights/x", "a:train:0", "snapshot", "adamw"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)


def shaped_like(schema: dict[str, Any], known: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Roughly what a schema says, and sometimes anything else."""
    if "$ref" in schema:
        return shaped_like(known[schema["$ref"].rsplit("/", 1)[-1]], known)
    if "anyOf" in schema:
        return st.one_of(*(shaped_like(one, known) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kinds: dict[str | None, st.SearchStrategy[Any]] = {
        "string": st.sampled_from(["1", "a:train:0", BASE_MODEL, "x", "", "\0", "adamw", "snapshot"])
        | st.text(max_size=4),
        "integer": st.integers(-1, 5) | st.integers(),
        "number": st.floats() | st.floats(0, 1),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    if schema.get("type") == "array":
        plain = st.lists(shaped_like(schema.get("items", {}), known), max_size=3)
    elif schema.get("type") == "object" and "properties" in schema:
        required = set(schema.get("required", ()))
        fields = {name: shaped_like(one, known) for name, one in schema["properties"].items()}
        plain = st.fixed_dictionaries(
            {name: one for name, one in fields.items() if name in required},
            optional={name: one for name, one in fields.items() if name not in required},
        )
    else:
        plain = kinds.get(schema.get("type"), VALUES)
    return st.one_of(plain, plain, plain, plain, plain, VALUES)


@contextmanager
def _posted(server: Running) -> Iterator[tuple[httpx.Client, dict[str, Any]]]:
    with server.client() as http:
        yield http, httpx.get(f"{server.url}/openapi.json").json()


def test_nothing_that_is_posted_breaks_the_server(server: Running) -> None:
    with _posted(server) as (http, told):
        known = told["components"]["schemas"]
        bodies = {
            (method, path): content["schema"]
            for path, methods in told["paths"].items()
            for method, one in methods.items()
            for kind, content in one.get("requestBody", {}).get("content", {}).items()
            if kind == "application/json"
        }
        for one in list(bodies.values()):
            known = {**known, **one.get("$defs", {})}
        assert len(bodies) > 20
        session_id = http.post("create_session", json={"tags": []}).json()["session_id"]

        @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(st.data())
        def post(data: st.DataObject) -> None:
            method, path = data.draw(st.sampled_from(sorted(bodies)))
            body = data.draw(shaped_like(bodies[method, path], known))
            if isinstance(body, dict) and "session_id" in body and data.draw(st.booleans()):
                body["session_id"] = session_id
            url = server.url + re.sub(
                r"\{[^}]*\}", data.draw(st.sampled_from(["a:train:0", session_id, "weights/x"])), path
            )
            text = json.dumps(body)
            reply = http.request(method, url, content=text, headers={"Content-Type": "application/json"})
            seen.add(reply.status_code)
            assert reply.status_code < 500, (method, path, text, reply.text)
            assert reply.status_code != 409
            assert reply.status_code < 400 or reply.json()["detail"]

        seen: set[int] = set()
        post()
        assert {200, 400, 404, 422} <= seen


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    path=st.sampled_from(["forward_backward", "forward", "asample", "create_session", "retrieve_future"]),
    kind=st.sampled_from(
        ["application/x-protobuf", "application/json", "text/plain", "", "multipart/form-data; boundary=x"]
    ),
    encoding=st.sampled_from(["", "zstd", "gzip", "identity"]),
    body=st.binary(max_size=300),
)
def test_no_bytes_break_the_server(server: Running, path: str, kind: str, encoding: str, body: bytes) -> None:
    headers = {"Content-Type": kind, **({"Content-Encoding": encoding} if encoding else {})}
    with server.client() as http:
        reply = http.post(path, content=body, headers=headers)
    assert 400 <= reply.status_code < 500
    assert reply.json()["detail"]


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The server as users start it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (sys.executable, "-m", "tx.tinker.api", "--base-model", BASE_MODEL, "--checkpoints-base", str(folder))
    environment = {**CHILD_ENVIRONMENT, "TX_DATABASE_URL": url_for(folder)}
    child = subprocess.Popen(
        (*command, "--port", str(port), *arguments), env=environment, stderr=subprocess.PIPE, text=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/api/v1/healthz", child)
        yield url, child
    finally:
        child.kill()
        child.communicate()


def _wait_for(url: str, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and child.poll() is None:
        try:
            httpx.get(url)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the server did not start")


def test_what_was_accepted_outlasts_a_kill(tmp_path: Path) -> None:
    with process(tmp_path, "--no-engine") as (url, child):
        promises = [httpx.post(f"{url}/api/v1/asample", json=SAMPLE).json() for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        child.wait()
    with serving(tmp_path) as running, running.client() as http:
        for promise in promises:
            assert http.post("retrieve_future", json=promise).json()["sequences"]


def test_polls_do_not_hold_up_the_end(tmp_path: Path) -> None:
    with process(tmp_path, "--no-engine") as (url, child):
        promise = httpx.post(f"{url}/api/v1/asample", json=SAMPLE).json()
        with httpx.Client(timeout=20) as http, http.stream("GET", f"{url}/api/v1/healthz"):
            poll = subprocess.Popen(
                [sys.executable, "-c", _POLL, f"{url}/api/v1/retrieve_future", promise["request_id"]],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert poll.stdout is not None
            assert poll.stdout.readline() == "asking\n"
            time.sleep(0.5)
            child.send_signal(signal.SIGTERM)
            started = time.monotonic()
            assert '"try_again"' in poll.communicate(timeout=20)[0]
        child.wait(20)
        assert time.monotonic() - started < 10


_POLL = """
import sys, httpx
print("asking", flush=True)
print(httpx.post(sys.argv[1], json={"request_id": sys.argv[2]}, timeout=30).text, flush=True)
"""
