"""Base class for engines behind an HTTP server, with one streamed HTTP request per response."""

import asyncio
import json
import socket
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
from transformers import PreTrainedTokenizerBase

from skyrl_gym.runtime.text import describe_error
from skyrl_train.errors import EngineError, EngineLostError, SkyRLError
from skyrl_train.inference_engines.scheduled import AsyncEngine, Output
from skyrl_train.inference_engines.sequence import ActiveSequence
from skyrl_train.inference_engines.stepped import EngineFacts, EngineThread

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 60.0
HEALTH_INTERVAL_S = 10.0
MAX_ERROR_CHARS = 500


class RejectedRequest(EngineError):
    """The server rejected a request with HTTP status 4xx, so it would reject it again."""


class HTTPEngine(AsyncEngine):
    """An engine whose backend is a server that streams responses as server-sent events.

    Closing a request's connection makes the server abort it. While responses are running, the server's health is
    checked every `HEALTH_INTERVAL_S`.
    """

    GENERATE: ClassVar[str]  # server path that generates responses
    HEALTH: ClassVar[str] = "/health"  # server path that answers as long as the server's backend is alive

    def __init__(self, url: str, facts: EngineFacts, tokenizer: PreTrainedTokenizerBase) -> None:
        """Create the client of the server at `url`."""
        super().__init__(facts, tokenizer, EngineThread(None, "http-engine"))
        self._url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # ignore this machine's proxy settings
        )
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    @abstractmethod
    def _body(self, request_id: str, sequence: ActiveSequence) -> dict[str, Any]:
        """Return the request body that continues a sequence after its tokens so far."""

    @abstractmethod
    def _read_event(self, request_id: str, sequence: ActiveSequence, event: Mapping[str, Any]) -> Output:
        """Parse one stream event into its new tokens, and advance `sequence.n_received` if the backend needs it."""

    async def _submit_to_backend(self, new: Mapping[str, ActiveSequence]) -> None:
        for request_id, sequence in new.items():
            self._streams[request_id] = asyncio.create_task(self._read(request_id, sequence))
        if self._streams and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())

    async def _read(self, request_id: str, sequence: ActiveSequence) -> None:
        """Stream one response, and report how it ended. The request waits for this report."""
        problem = f"the server at {self._url} ended a response early"
        try:
            body = self._body(request_id, sequence)
        except Exception as error:  # noqa: BLE001, the boundary of a request
            self._streams.pop(request_id, None)
            problem = f"cannot send the request: {describe_error(error)}"
            self._outputs.put_nowait(Output(request_id, [], is_over=True, error=problem))
            return
        try:
            await self._stream(request_id, sequence, body)
        except httpx.HTTPError as error:
            self._outputs.put_nowait(EngineLostError(f"the server at {self._url} broke off a response: {error!r}"))
            return
        except Exception as error:  # noqa: BLE001, the boundary of a response
            problem = str(error) if isinstance(error, SkyRLError) else f"{self._url} sent an unknown event: {error!r}"
        finally:
            self._streams.pop(request_id, None)
        self._outputs.put_nowait(Output(request_id, [], is_over=True, error=problem))

    async def _stream(self, request_id: str, sequence: ActiveSequence, body: Mapping[str, Any]) -> None:
        """Stream the response to `body` and put its tokens into the queue."""
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)  # `_watch` notices a server that hangs
        async with self._http.stream("POST", self.GENERATE, json=body, timeout=timeout) as response:
            if response.is_error:
                await response.aread()
                kind = RejectedRequest if response.is_client_error else EngineError
                raise kind(f"the server at {self._url} rejected a request: {describe_response(response)}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._outputs.put_nowait(self._read_event(request_id, sequence, json.loads(line[6:])))

    async def _watch(self) -> None:
        """Fail the waiting requests if the server is no longer healthy."""
        while self._streams:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                await self.check_health()
            except EngineError as error:
                self._outputs.put_nowait(error)
                return

    async def check_health(self) -> None:
        await super().check_health()
        try:
            await self._request("GET", self.HEALTH)
        except EngineError as error:
            raise EngineLostError(str(error)) from error.__cause__

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if stream := self._streams.pop(request_id, None):
                stream.cancel()

    async def _request(
        self, method: str, path: str, *, timeout_s: float | None = ANSWER_TIMEOUT_S, **options: Any
    ) -> Any:
        """Call the server asynchronously, as `call_server` does."""
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            response = await self._http.request(method, path, timeout=timeout, **options)
        except httpx.HTTPError as error:
            raise EngineLostError(
                f"the server at {self._url} does not answer {path}: {error!r}; is it running?"
            ) from error
        return read_answer(response)

    async def _shut_down(self) -> None:
        tasks = [*self._streams.values(), *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._http.aclose()


def call_server(url: str, method: str, path: str, **options: Any) -> Any:
    """Call a server and return the JSON of its answer, if any. Blocks. EngineError if it fails or times out."""
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(base_url=url, timeout=timeout, trust_env=False) as client:
            response = client.request(method, path, **options)
    except httpx.HTTPError as error:
        raise EngineError(f"no server answers at {url}{path}: {error!r}; start it, or correct the address") from error
    return read_answer(response)


def read_answer(response: httpx.Response) -> Any:
    """Return the JSON of an answer, if any. Raise EngineError for an error status."""
    if response.is_error:
        raise EngineError(f"{response.request.url} answered with {describe_response(response)}")
    with suppress(ValueError):
        return response.json()
    return None


def describe_response(response: httpx.Response) -> str:
    """Format the status of an answer and the start of its text."""
    return f"HTTP {response.status_code}: {response.text[:MAX_ERROR_CHARS].strip()}"


def server_url(address: str) -> str:
    """Convert "host:port" to a URL. A URL is unchanged, except for trailing slashes."""
    url = address if "://" in address else f"http://{address}"
    return url.rstrip("/")


def find_host(url: str) -> str:
    """Return this machine's address on the network of a server."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing
        return probe.getsockname()[0]
