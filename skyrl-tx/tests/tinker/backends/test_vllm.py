"""Failures of a server that does not respond. `tests/vllm_server` tests a real vLLM."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from tx.tinker.backends.base import Backend
from tx.tinker.backends.vllm import MAX_CONNECTIONS, VllmSampler
from tx.tinker.types import SampleRequest, SampleResult, SamplingParams, UserError

SECONDS = 60
N_SAMPLES = 20
ASKED = SampleRequest([1, 2], SamplingParams(max_tokens=1, temperature=0.0))
CHOICE = {
    "index": 0,
    "token_ids": [3],
    "finish_reason": "length",
    "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{}]},
}


def sampler_of(port: int, folder: Path, answer_sec: float = SECONDS) -> VllmSampler:
    nobody = cast(Backend, None)  # no weights are exported
    return VllmSampler(nobody, f"http://127.0.0.1:{port}/v1", "EMPTY", folder, answer_sec)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Answers(BaseHTTPRequestHandler):
    """Responds like vLLM, immediately; refuses the prompt 13."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [13]:
            self._answer(400, {"error": {"message": "Requested sample logprobs of 32"}})
        else:
            self._answer(200, {"choices": [{**CHOICE, "index": i} for i in range(body["n"])]})

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[VllmSampler]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        with closing(sampler_of(server.server_address[1], tmp_path)) as sampler:
            yield sampler
        server.shutdown()


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts requests and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=MAX_CONNECTIONS) as server:
        yield server.getsockname()[1]


def test_results_are_reported_at_once(answering: VllmSampler) -> None:
    found: list[SampleResult | Exception] = []
    for _ in range(N_SAMPLES):
        answering.sample(ASKED, None, found.append)
    until(lambda: answering._found.qsize() == N_SAMPLES)
    assert answering.step()
    assert [list(one.samples[0].tokens) for one in found if isinstance(one, SampleResult)] == [[3]] * N_SAMPLES
    assert not answering.step()


def test_a_cancelled_result_is_not_reported(answering: VllmSampler) -> None:
    found: list[SampleResult | Exception] = []
    cancel = answering.sample(ASKED, None, found.append)
    until(lambda: answering._found.qsize() == 1)
    cancel()
    assert answering.step()
    assert found == []
    assert not answering.step()


def test_greedy_requests_sample_once(answering: VllmSampler) -> None:
    found: list[SampleResult | Exception] = []
    answering.sample(SampleRequest([1], ASKED.params, n_samples=3), None, found.append)
    until(lambda: answering.step() and bool(found))
    (result,) = found
    assert isinstance(result, SampleResult)
    assert [list(one.tokens) for one in result.samples] == [[3], [3], [3]]


def test_refusals_of_the_server_are_user_errors(answering: VllmSampler) -> None:
    found: list[SampleResult | Exception] = []
    answering.sample(SampleRequest([13], ASKED.params), None, found.append)
    until(lambda: answering.step() and bool(found))
    assert isinstance(found[0], UserError)
    assert "Requested sample logprobs of 32" in str(found[0])


def test_it_closes_although_the_server_does_not_respond(silent: int, tmp_path: Path) -> None:
    sampler = sampler_of(silent, tmp_path)
    cancels = [sampler.sample(ASKED, None, lambda _: None) for _ in range(2 * MAX_CONNECTIONS)]
    cancels[0]()
    assert sampler.step()
    closing_thread = threading.Thread(target=sampler.close)
    closing_thread.start()
    closing_thread.join(SECONDS)
    assert not closing_thread.is_alive()
    assert not sampler._thread.is_alive()


def test_a_slow_response_is_an_error(silent: int, tmp_path: Path) -> None:
    found: list[SampleResult | Exception] = []
    with closing(sampler_of(silent, tmp_path, answer_sec=0.1)) as sampler:
        sampler.sample(ASKED, None, found.append)
        until(lambda: sampler.step() and bool(found))
    assert "failed: ReadTimeout" in str(found[0])
