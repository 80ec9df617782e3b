"""Failures of a server that does not respond. `tests/vllm_server` tests a real vLLM."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tx_kit.servers import SECONDS, wait_until
from tx_kit.vllm import answering_server

from tx.tinker.backends.vllm import MAX_CONNECTIONS, VllmSampler
from tx.tinker.types import SampleRequest, SampleResult, SamplingParams

N_SAMPLES = 20
ASKED = SampleRequest([1, 2], SamplingParams(max_tokens=1, temperature=0.0))


def sampler_of(port: int, folder: Path, answer_sec: float = SECONDS) -> VllmSampler:
    return VllmSampler(f"http://127.0.0.1:{port}/v1", "EMPTY", folder, answer_sec)


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[VllmSampler]:
    with answering_server() as server, closing(VllmSampler(f"{server.url}/v1", "EMPTY", tmp_path, SECONDS)) as sampler:
        yield sampler


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts requests and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=MAX_CONNECTIONS) as server:
        yield server.getsockname()[1]


def test_results_are_reported_at_once_unless_they_are_cancelled(answering: VllmSampler) -> None:
    found: list[SampleResult | Exception] = []
    cancels = [answering.sample(ASKED, None, found.append) for _ in range(N_SAMPLES + 1)]
    wait_until(lambda: answering._found.qsize() == N_SAMPLES + 1)
    cancels[7]()
    assert answering.step()
    assert not [one for one in found if isinstance(one, Exception)]
    assert [list(one.samples[0].tokens) for one in found if isinstance(one, SampleResult)] == [[3]] * N_SAMPLES
    assert not answering.step()


def ask(sampler: VllmSampler, request: SampleRequest = ASKED) -> SampleResult | Exception:
    found: list[SampleResult | Exception] = []
    sampler.sample(request, None, found.append)
    wait_until(lambda: sampler.step() and bool(found))
    return found[0]


def test_greedy_requests_sample_once(answering: VllmSampler) -> None:
    result = ask(answering, SampleRequest([1], ASKED.params, n_samples=3))
    assert isinstance(result, SampleResult)
    assert [list(one.tokens) for one in result.samples] == [[3], [3], [3]]


def test_a_slow_response_is_an_error(silent: int, tmp_path: Path) -> None:
    with closing(sampler_of(silent, tmp_path, answer_sec=0.1)) as sampler:
        assert "failed: ReadTimeout" in str(ask(sampler))


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
