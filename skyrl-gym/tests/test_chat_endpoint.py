import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gym_kit.messages import user
from gym_kit.processes import no_leaks
from gym_kit.servers import ModelServer

from skyrl_gym import chat_endpoint as endpoint_module
from skyrl_gym.chat_endpoint import ChatEndpoint, EndpointConfig, EndpointError

MESSAGES = user("Your move — ♞?")


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


@pytest.fixture
def connect() -> Iterator[Callable[..., ChatEndpoint]]:
    """Return a constructor of endpoints, which are closed after the test."""
    endpoints: list[ChatEndpoint] = []

    def connect(url: str, **options: Any) -> ChatEndpoint:
        options = {"base_url": url, "model": "frozen", "timeout_seconds": 5.0, **options}
        endpoints.append(ChatEndpoint(EndpointConfig.from_options(options)))
        return endpoints[-1]

    yield connect
    for endpoint in endpoints:
        endpoint.close()


def test_conversation_gets_a_reply(model_server: ModelServer, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROZEN_KEY", "secret")
    model_server.answer = lambda messages: messages[-1]["content"] + " Nf3"
    sampling_params = {"temperature": 0.5, "model": "other"}
    endpoint = connect(
        model_server.url + "/",
        api_key_env="FROZEN_KEY",  # pragma: allowlist secret
        sampling_params=sampling_params,
    )
    assert endpoint(MESSAGES) == "Your move — ♞? Nf3"
    assert connect(model_server.url)(MESSAGES) == "Your move — ♞? Nf3"
    request, without_key = model_server.requests
    assert request.path == "/v1/chat/completions"
    assert request.body == {"temperature": 0.5, "model": "frozen", "messages": MESSAGES}
    assert request.headers["authorization"] == "Bearer secret"
    assert "authorization" not in without_key.headers


def test_one_connection_is_reused_and_closed(model_server: ModelServer, connect: Any) -> None:
    with no_leaks():
        endpoint = connect(model_server.url)
        for _ in range(5):
            endpoint(MESSAGES)
        assert len({request.client for request in model_server.requests}) == 1
        endpoint.close()
        endpoint.close()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_busy_endpoint_is_retried(
    model_server: ModelServer, connect: Any, status: int, recorded_pauses: list[float]
) -> None:
    replies: list[Any] = [(status, b"busy"), (status, b"busy"), "b2"]
    model_server.answer = lambda messages: replies.pop(0)
    assert connect(model_server.url)(MESSAGES) == "b2"
    assert len(recorded_pauses) == 2
    assert recorded_pauses[0] <= 0.5 <= recorded_pauses[1] <= 1.0


@pytest.mark.parametrize(
    ("header", "min_s", "max_s"), [("7", 7, 7), ("100000", 30, 30), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0.5)]
)
def test_retry_after_is_respected_within_bounds(
    model_server: ModelServer, connect: Any, recorded_pauses: list[float], header: str, min_s: float, max_s: float
) -> None:
    replies: list[Any] = [(429, b""), "b2"]
    model_server.answer = lambda messages: replies.pop(0)
    model_server.headers["Retry-After"] = header
    assert connect(model_server.url)(MESSAGES) == "b2"
    assert min_s <= recorded_pauses[-1] <= max_s


def test_last_problem_is_raised_after_the_last_attempt(model_server: ModelServer, connect: Any) -> None:
    model_server.answer = lambda messages: (503, b"no GPU today")
    with pytest.raises(EndpointError, match=r"'frozen' at http.* gave no reply in 3 attempts\. .*503: no GPU today"):
        connect(model_server.url, n_attempts=3)(MESSAGES)
    assert len(model_server.requests) == 3


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_refusal_is_not_retried(model_server: ModelServer, connect: Any, status: int) -> None:
    model_server.answer = lambda messages: (status, b"unknown model")
    model_server.headers["Location"] = model_server.url
    with pytest.raises(EndpointError, match=f"refused: status {status}: unknown model"):
        connect(model_server.url)(MESSAGES)
    assert len(model_server.requests) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        *((body, "sent no chat completion") for body in (b"", b"hello", b"[]", b"{}", b'{"choices": []}', b"\xff")),
        (b'{"choices": [{"text": "a"}]}', "sent no chat completion"),
        (b'{"choices": [{"message": {"content": [1]}}]}', "a message that is not text"),
    ],
)
def test_invalid_chat_completion_raises(model_server: ModelServer, connect: Any, body: bytes, message: str) -> None:
    model_server.answer = lambda messages: (200, body)
    with pytest.raises(EndpointError, match=message):
        connect(model_server.url)(MESSAGES)


def test_slow_endpoint_times_out(connect: Any) -> None:
    """Every byte arrives in time, but the whole reply does not."""
    with no_leaks(), socket.create_server(("127.0.0.1", 0)) as server:
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

        threading.Thread(target=drip).start()
        endpoint = connect(f"http://127.0.0.1:{server.getsockname()[1]}/v1", timeout_seconds=0.4, n_attempts=1)
        begun = time.monotonic()
        with pytest.raises(EndpointError, match="did not end in time"):
            endpoint(MESSAGES)
        assert time.monotonic() - begun < 60
        done.set()
        endpoint.close()


def test_endless_reply_is_refused(model_server: ModelServer, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_MAX_REPLY_BYTES", 1000)
    model_server.answer = lambda messages: "x" * 100_000
    with pytest.raises(EndpointError, match="more than 1000 bytes"):
        connect(model_server.url, n_attempts=1)(MESSAGES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": None, "model": None}, "has no base_url and no model"),
        ({"base_url": "localhost:8000"}, "base_url='localhost:8000' must start with http"),
        ({"model": ""}, "model='' must be the name"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 must be above 0"),
        ({"n_attempts": 0}, "n_attempts=0 must be at least 1"),
        ({"sampling_params": 3}, "sampling_params=3 must be a mapping"),
        ({"api_key_env": "NOT_SET"}, "'NOT_SET' is not set or empty"),  # pragma: allowlist secret
    ],
)
def test_invalid_config_is_refused(options: dict[str, Any], message: str) -> None:
    options = {"base_url": "http://x", "model": "m"} | options
    with pytest.raises(ValueError, match=message):
        EndpointConfig.from_options({name: value for name, value in options.items() if value is not None})
