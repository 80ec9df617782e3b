"""The server as a process, and the requests that it refuses."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tx_kit.processes import process
from tx_kit.servers import SAMPLE, Running, assert_refused, serving, wait_until

from tx.tinker.db_models import Kind, RequestStatus

SERVER_SETTINGS = {"hold_sec": 0.05}


def test_unknown_paths(server: Running, http: httpx.Client) -> None:
    for path in ("/api/v1/nonsense", "/favicon.ico", "/api/v1/training_runs/a%00b", "/api/v1/sessions/%ff"):
        found = httpx.get(server.url + path)
        assert found.status_code == 404
        assert found.json()["detail"]
    assert_refused(http.delete("training_runs/a:train:0/checkpoints/0001"), "weights/<name>")
    assert http.delete("training_runs/a:train:0/checkpoints/weights/..%2f..%2fx").status_code == 400
    assert http.get("downloads/forged.token/file").status_code == 403


SAVE = {"model_id": "m", "path": "x"}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("save_weights_for_sampler", {**SAVE, "kind": "inflight"}, "kind='inflight'"),
        ("save_weights_external", {**SAVE, "age_encryption_recipients": ["a"]}, "age_encryption_recipients"),
        ("asample", {**SAMPLE, "target_prompt_logprobs": True}, "target_prompt_logprobs"),
        ("asample", {**SAMPLE, "prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], name: str
) -> None:
    assert_refused(http.post(path, json=body), f"{name} is not supported by this server; ")


def test_requests_and_results_survive_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with process(state, "--no-engine") as server:
        promises = [httpx.post(f"{server.url}/api/v1/asample", json=SAMPLE).json() for _ in range(20)]
        server.kill()
    with serving(state) as running:
        wait_until(lambda: all(one.status is RequestStatus.DONE for one in running.rows(Kind.SAMPLE)))
    with serving(state, engine=False) as running, running.client() as http:
        for promise in promises:
            assert http.post("retrieve_future", json=promise).json()["sequences"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_polls_do_not_delay_shutdown(number: int, tmp_path: Path) -> None:
    with process(tmp_path / "state", "--no-engine") as server:
        url, child = server.url, server.child
        promise = httpx.post(f"{url}/api/v1/asample", json=SAMPLE).json()
        with httpx.Client(timeout=20) as http, http.stream("GET", f"{url}/api/v1/healthz"):
            post = f'httpx.post("{url}/api/v1/retrieve_future", json={promise}, timeout=30)'
            program = f"import httpx; print({post}.text, flush=True)"
            poll = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            wait_until(lambda: "tx_polls_held 1.0" in httpx.get(f"{url}/metrics").text)
            child.send_signal(number)
            started = time.monotonic()
            assert '"try_again"' in poll.communicate(timeout=20)[0]
        assert child.wait(20) != -signal.SIGHUP
        assert time.monotonic() - started < 20
