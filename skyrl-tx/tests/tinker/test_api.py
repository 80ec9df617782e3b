"""The server as a process, and the requests that it refuses."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tx_kit.processes import SECONDS, process
from tx_kit.servers import SAMPLE, Running, serving

from tx.tinker.db_models import Kind, RequestStatus


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("state"), hold_sec=0.05) as running:
        yield running


def test_unknown_paths(server: Running) -> None:
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


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("save_weights_for_sampler", {"model_id": "m", "path": "x", "kind": "inflight"}, "kind='inflight'"),
        (
            "save_weights_external",
            {"model_id": "m", "path": "x", "age_encryption_recipients": ["a"]},
            "age_encryption_recipients",
        ),
        ("asample", {**SAMPLE, "target_prompt_logprobs": True}, "target_prompt_logprobs"),
        ("asample", {**SAMPLE, "prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
    ],
)
def test_unsupported_options_are_refused_by_name(server: Running, path: str, body: dict[str, Any], name: str) -> None:
    with server.client() as http:
        refused = http.post(path, json=body)
    assert refused.status_code == 400
    assert f"{name} is not supported by this server; " in refused.json()["detail"]


def test_requests_and_results_survive_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with process(state, "--no-engine") as server:
        promises = [httpx.post(f"{server.url}/api/v1/asample", json=SAMPLE).json() for _ in range(20)]
        server.kill()
    with serving(state) as running:
        deadline = time.monotonic() + SECONDS
        while any(one.status is not RequestStatus.DONE for one in running.rows(Kind.SAMPLE)):
            assert time.monotonic() < deadline
    with serving(state, engine=False) as running, running.client() as http:
        for promise in promises:
            assert http.post("retrieve_future", json=promise).json()["sequences"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_polls_do_not_delay_shutdown(number: int, tmp_path: Path) -> None:
    with process(tmp_path / "state", "--no-engine") as server:
        url, child = server.url, server.child
        promise = httpx.post(f"{url}/api/v1/asample", json=SAMPLE).json()
        with httpx.Client(timeout=20) as http, http.stream("GET", f"{url}/api/v1/healthz"):
            poll = subprocess.Popen(
                [sys.executable, "-c", _POLL, f"{url}/api/v1/retrieve_future", promise["request_id"]],
                stdout=subprocess.PIPE,
                text=True,
            )
            deadline = time.monotonic() + SECONDS
            while "tx_polls_held 1.0" not in httpx.get(f"{url}/metrics").text:
                assert time.monotonic() < deadline
            child.send_signal(number)
            started = time.monotonic()
            assert '"try_again"' in poll.communicate(timeout=20)[0]
        assert child.wait(20) != -signal.SIGHUP
        assert time.monotonic() - started < 20


_POLL = """
import sys, httpx
print(httpx.post(sys.argv[1], json={"request_id": sys.argv[2]}, timeout=30).text, flush=True)
"""
