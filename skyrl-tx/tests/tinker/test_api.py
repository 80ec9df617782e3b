"""The server as a process, with what people and Prometheus see."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tx_process import process
from tx_server import BASE_MODEL, Running, serving

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


def test_what_was_accepted_outlasts_a_kill(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with process(state, "--no-engine") as server:
        promises = [httpx.post(f"{server.url}/api/v1/asample", json=SAMPLE).json() for _ in range(20)]
        server.kill()
    with serving(state) as running, running.client() as http:
        for promise in promises:
            assert http.post("retrieve_future", json=promise).json()["sequences"]


def test_polls_do_not_hold_up_the_end(tmp_path: Path) -> None:
    with process(tmp_path / "state", "--no-engine") as server:
        url, child = server.url, server.child
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
