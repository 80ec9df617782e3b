"""A language model behind an OpenAI-compatible URL."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import urllib3

from skyrl_gym import error
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.options import finite_number, reject_unknown, set_options
from skyrl_gym.envs.row import whole_number

_RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_MAX_PAUSE_SECONDS = 30.0
_MAX_REPLY_BYTES = 32 * 1024 * 1024


class EndpointError(error.Error):
    """The endpoint does not reply, or its reply is invalid."""


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """A model's address and request parameters.

    base_url: the URL before ``/chat/completions``, e.g. ``http://127.0.0.1:8000/v1``.
    model: the model's name at the endpoint.
    api_key_env: the environment variable that holds the key. Empty for none.
    sampling_params: more fields of the request, e.g. ``{"temperature": 1.0, "max_tokens": 1024}``.
    timeout_seconds: limit of one request. If the server stalls while it answers, up to twice as long.
    n_attempts: maximum number of requests, with pauses between them.
    """

    base_url: str
    model: str
    api_key_env: str = ""
    sampling_params: dict[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 120.0
    n_attempts: int = 4

    def __post_init__(self) -> None:
        if not str(self.base_url).startswith(("http://", "https://")):
            raise ValueError(f"base_url={self.base_url!r} must start with http:// or https://")
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model={self.model!r} must be the name of a model at {self.base_url}")
        if not isinstance(self.sampling_params, Mapping):
            raise ValueError(
                f"sampling_params={self.sampling_params!r} must be a mapping, such as {{temperature: 1.0}}"
            )
        if finite_number(self.timeout_seconds, "timeout_seconds") <= 0:
            raise ValueError(f"timeout_seconds={self.timeout_seconds} must be above 0")
        whole_number(self.n_attempts, "n_attempts", at_least=1)
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(f"api_key_env={self.api_key_env!r} is not set or empty; export it, or remove api_key_env")

    @staticmethod
    def from_options(options: Mapping[str, Any] | None) -> EndpointConfig:
        """Create the configuration from options. Raises `ValueError` if one is missing, unknown or invalid."""
        options = set_options(options)
        reject_unknown(options, [option.name for option in fields(EndpointConfig)], "the endpoint")
        missing = [name for name in ("base_url", "model") if name not in options]
        if missing:
            raise ValueError(f"the endpoint of opponent=policy has no {' and no '.join(missing)}; got {options}")
        return EndpointConfig(**options)


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply, e.g. ``Completion("Paris", "stop", 120)``. `n_tokens` counts prompt and reply, if the server says so."""

    text: str
    finish_reason: str | None = None
    n_tokens: int | None = None


class ChatEndpoint:
    """A model behind a URL: ``reply = endpoint(messages)``. The call blocks until the reply. Thread-safe.

    Raises:
        EndpointError: no reply after `n_attempts` requests, or the reply is not a chat completion.
    """

    def __init__(self, config: EndpointConfig, n_connections: int = 1) -> None:
        self.config = config
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=n_connections)
        self._jitter = random.Random()  # separate, because resuming a run restores the global generator

    def __call__(self, messages: ConversationType) -> str:
        return self.complete(messages).text

    def complete(
        self,
        messages: ConversationType,
        gate: Callable[[], AbstractContextManager[None]] = nullcontext,
        stop: threading.Event | None = None,
    ) -> Completion:
        """Return the reply. Each request runs in a new `gate()`, without the pauses. `stop` ends the retries."""
        problem = ""
        for attempt in range(self.config.n_attempts):
            try:
                with gate():
                    status, headers, body = self._post(messages)
            except urllib3.exceptions.HTTPError as failure:
                problem, pause = repr(failure), 0.0
            else:
                if status == 200:
                    return self._parse_reply(body)
                problem = f"status {status}: {body[:500].decode('utf-8', 'replace')}"
                if status not in _RETRIED_STATUSES:
                    raise EndpointError(f"{self._name} refused: {problem}")
                pause = _retry_after(headers)
            if attempt + 1 < self.config.n_attempts:
                seconds = max(pause, min(8.0, 0.5 * 2**attempt) * self._jitter.uniform(0.5, 1.0))
                if (stop.wait if stop else time.sleep)(seconds):
                    raise EndpointError(f"{self._name}: the caller gave up. The last attempt: {problem}")
        raise EndpointError(f"{self._name} gave no reply in {self.config.n_attempts} attempts. The last one: {problem}")

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._pool.clear()

    @property
    def _name(self) -> str:
        return f"the model {self.config.model!r} at {self.config.base_url}"

    def _post(self, messages: ConversationType) -> tuple[int, Mapping[str, str], bytes]:
        """Send one request. Return status, headers and body."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.config.api_key_env:
            headers["Authorization"] = f"Bearer {os.environ[self.config.api_key_env]}"
        deadline = time.monotonic() + self.config.timeout_seconds
        response = self._pool.request(
            "POST",
            f"{self.config.base_url.rstrip('/')}/chat/completions",
            body=json.dumps({**self.config.sampling_params, "model": self.config.model, "messages": messages}),
            headers=headers,
            timeout=urllib3.Timeout(total=self.config.timeout_seconds),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        try:
            return response.status, response.headers, _read_body(response, deadline)
        finally:
            response.close()

    def _parse_reply(self, body: bytes) -> Completion:
        try:
            answer = json.loads(body)
            choice = answer["choices"][0]
            content = choice["message"]["content"]
            n_tokens = (answer.get("usage") or {}).get("total_tokens")
        except (AttributeError, ValueError, KeyError, IndexError, TypeError) as problem:
            raise EndpointError(f"{self._name} sent no chat completion ({problem!r}): {body[:500]!r}") from problem
        if content is not None and not isinstance(content, str):
            raise EndpointError(f"{self._name} sent a message that is not text: {content!r}")
        text = content or ""  # null if the model wrote only thoughts
        return Completion(text, choice.get("finish_reason"), n_tokens if isinstance(n_tokens, int) else None)


def _read_body(response: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """Read the body, until the deadline and up to `_MAX_REPLY_BYTES`. urllib3's timeout limits only each read."""
    body = bytearray()
    while chunk := response.read1(65536):
        body += chunk
        if time.monotonic() > deadline:
            raise urllib3.exceptions.TimeoutError("the reply did not end in time; raise timeout_seconds")
        if len(body) > _MAX_REPLY_BYTES:
            raise EndpointError(f"the reply has more than {_MAX_REPLY_BYTES} bytes")
    return bytes(body)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the delay in seconds that the endpoint asks for, or 0 if it gives no number."""
    try:
        pause = float(headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0
    return min(max(pause, 0.0), _MAX_PAUSE_SECONDS)
