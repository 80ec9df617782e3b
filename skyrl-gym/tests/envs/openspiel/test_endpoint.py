from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
from typing import Any

import pytest

from skyrl_gym.envs.openspiel import endpoint as endpoint_module
from skyrl_gym.envs.openspiel.endpoint import ChatEndpoint, EndpointConfig, EndpointError

MESSAGES = [{"role": "user", "content": "Your move — ♞?"}]


@pytest.fixture(autouse=True)
def recorded_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between attempts, and shorten them to a thousandth."""
    pauses: list[float] = []
    sleep = time.sleep

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds / 1000)

    monkeypatch.setattr(endpoint_module.time, "sleep", pause)
    return pauses


def make_endpoint(url: str, **options: Any) -> ChatEndpoint:
    return ChatEndpoint(
        EndpointConfig.from_options({"base_url": url, "model": "frozen", "timeout_seconds": 5.0, **options})
    )


def open_sockets() -> int:
    """Return the number of open sockets of this process."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("socket:") for link in links)


def test_conversation_gets_a_reply(model_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROZEN_KEY", "secret")
    model_server.answer = lambda messages: messages[-1]["content"] + " Nf3"
    endpoint = make_endpoint(
        model_server.url + "/",
        api_key_env="FROZEN_KEY",  # pragma: allowlist secret
        sampling_params={"temperature": 0.5, "model": "other"},
    )
    assert endpoint(MESSAGES) == "Your move — ♞? Nf3"
    endpoint.close()
    (request,) = model_server.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["body"] == {"temperature": 0.5, "model": "frozen", "messages": MESSAGES}
    assert request["headers"]["Authorization"] == "Bearer secret"


def test_no_authorization_without_a_key(model_server: Any) -> None:
    endpoint = make_endpoint(model_server.url)
    endpoint(MESSAGES)
    endpoint.close()
    assert "Authorization" not in model_server.requests[0]["headers"]


def test_one_connection_is_reused_and_closed(model_server: Any) -> None:
    before = open_sockets()
    endpoint = make_endpoint(model_server.url)
    for _ in range(5):
        endpoint(MESSAGES)
    assert len(model_server.clients) == 1
    endpoint.close()
    endpoint.close()
    deadline = time.monotonic() + 60
    while open_sockets() > before and time.monotonic() < deadline:  # the server's end closes in its own thread
        pass
    assert open_sockets() == before


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_busy_endpoint_is_retried(model_server: Any, status: int, recorded_pauses: list[float]) -> None:
    replies: list[Any] = [(status, b"busy"), (status, b"busy"), "b2"]
    model_server.answer = lambda messages: replies.pop(0)
    endpoint = make_endpoint(model_server.url)
    assert endpoint(MESSAGES) == "b2"
    endpoint.close()
    assert len(recorded_pauses) == 2
    assert recorded_pauses[0] <= 0.5 <= recorded_pauses[1] <= 1.0


def test_retry_after_is_respected_within_bounds(model_server: Any, recorded_pauses: list[float]) -> None:
    for header, pause in {"7": 7.0, "100000": 30.0}.items():
        replies: list[Any] = [(429, b""), "b2"]
        model_server.answer = lambda messages, replies=replies: replies.pop(0)
        model_server.headers = {"Retry-After": header}
        endpoint = make_endpoint(model_server.url)
        assert endpoint(MESSAGES) == "b2"
        endpoint.close()
        assert recorded_pauses[-1] == pause
    model_server.headers = {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}
    replies = [(429, b""), "b2"]
    model_server.answer = lambda messages: replies.pop(0)
    endpoint = make_endpoint(model_server.url)
    endpoint(MESSAGES)
    endpoint.close()
    assert recorded_pauses[-1] <= 0.5


def test_last_problem_is_raised_after_the_last_attempt(model_server: Any) -> None:
    model_server.answer = lambda messages: (503, b"no GPU today")
    endpoint = make_endpoint(model_server.url, n_attempts=3)
    with pytest.raises(EndpointError, match=r"'frozen' at http.* gave no reply in 3 attempts; .*503: no GPU today"):
        endpoint(MESSAGES)
    endpoint.close()
    assert len(model_server.requests) == 3


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_refusal_is_not_retried(model_server: Any, status: int) -> None:
    model_server.answer = lambda messages: (status, b"unknown model")
    model_server.headers = {"Location": model_server.url}
    endpoint = make_endpoint(model_server.url)
    with pytest.raises(EndpointError, match=f"refused: status {status}: unknown model"):
        endpoint(MESSAGES)
    endpoint.close()
    assert len(model_server.requests) == 1


@pytest.mark.parametrize(
    "body", [b"", b"hello", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"text": "a"}]}', b"\xff"]
)
def test_invalid_chat_completion_raises(model_server: Any, body: bytes) -> None:
    model_server.answer = lambda messages: (200, body)
    endpoint = make_endpoint(model_server.url)
    with pytest.raises(EndpointError, match="sent no chat completion"):
        endpoint(MESSAGES)
    endpoint.close()


def test_content_must_be_text_but_may_be_empty(model_server: Any) -> None:
    for content, reply in (("null", ""), ('""', "")):
        model_server.answer = lambda messages, content=content: (
            200,
            b'{"choices": [{"message": {"content": %s}}]}' % content.encode(),
        )
        endpoint = make_endpoint(model_server.url)
        assert endpoint(MESSAGES) == reply
        endpoint.close()
    model_server.answer = lambda messages: (200, b'{"choices": [{"message": {"content": [1]}}]}')
    endpoint = make_endpoint(model_server.url)
    with pytest.raises(EndpointError, match="a message that is not text"):
        endpoint(MESSAGES)
    endpoint.close()


def test_unreachable_endpoint_raises() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    endpoint = make_endpoint(url, n_attempts=2)
    with pytest.raises(EndpointError, match="gave no reply in 2 attempts"):
        endpoint(MESSAGES)
    endpoint.close()


def test_hanging_endpoint_times_out(model_server: Any) -> None:
    released = threading.Event()
    model_server.answer = lambda messages: "late" if released.wait(20) else "later"
    endpoint = make_endpoint(model_server.url, timeout_seconds=0.2, n_attempts=2)
    begun = time.monotonic()
    with pytest.raises(EndpointError, match="gave no reply in 2 attempts"):
        endpoint(MESSAGES)
    assert time.monotonic() - begun < 15
    released.set()
    endpoint.close()


def test_slow_endpoint_times_out() -> None:
    """Every byte arrives in time, but the whole reply does not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not done.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        endpoint = make_endpoint(f"http://127.0.0.1:{server.getsockname()[1]}/v1", timeout_seconds=0.4, n_attempts=1)
        begun = time.monotonic()
        with pytest.raises(EndpointError, match="took too long"):
            endpoint(MESSAGES)
        assert time.monotonic() - begun < 60
        done.set()
        endpoint.close()
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_endless_reply_is_refused(model_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_MAX_REPLY_BYTES", 1000)
    model_server.answer = lambda messages: "x" * 100_000
    endpoint = make_endpoint(model_server.url, n_attempts=1)
    with pytest.raises(EndpointError, match="more than 1000 bytes"):
        endpoint(MESSAGES)
    endpoint.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no base_url and no model"),
        ({"base_url": "http://x"}, "has no model"),
        ({"base_url": "localhost:8000", "model": "m"}, "base_url='localhost:8000' must start with http"),
        ({"base_url": "http://x", "model": ""}, "model='' must be the name"),
        ({"base_url": "http://x", "model": "m", "timeout": 3}, "did you mean 'timeout_seconds'"),
        ({"base_url": "http://x", "model": "m", "timeout_seconds": 0}, "timeout_seconds=0 must be above 0"),
        ({"base_url": "http://x", "model": "m", "n_attempts": 0}, "n_attempts=0 must be at least 1"),
        ({"base_url": "http://x", "model": "m", "sampling_params": 3}, "sampling_params=3 must be a mapping"),
        # pragma: allowlist nextline secret
        ({"base_url": "http://x", "model": "m", "api_key_env": "NOT_SET"}, "'NOT_SET' names an environment variable"),
    ],
)
def test_invalid_config_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EndpointConfig.from_options(options)


def test_error_can_be_pickled() -> None:
    assert str(pickle.loads(pickle.dumps(EndpointError("why")))) == "why"
