"""Sampling on a vLLM server, while a backend here trains. The server loads adapters from folders.

Start the server with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 32`. Its
log-probs are at temperature 1, unless you add `--logprobs-mode processed_logprobs`. With adapters, vLLM 0.32 on a CPU
crashes if prompt log-probs are requested while a second request runs.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import httpx
import numpy as np

from tx.models import peft
from tx.tinker.backends.base import Done
from tx.tinker.store.checkpoint_files import write_folder
from tx.tinker.types import ImageInput, Sample, SampleRequest, SampleResult, TinkerError, TopLogprobs, UserError

logger = logging.getLogger(__name__)

PREFIX = "tx-"
MAX_CONNECTIONS = 64
CONNECT_SEC, WAIT_SEC, CLOSE_SEC = 10.0, 0.005, 10.0
HINT = "start it with --enable-lora, a sufficient --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"


@dataclass(eq=False)
class VllmWeights:
    """An adapter by its name on the server. The server loads it on first use."""

    name: str
    folder: Path
    loading: asyncio.Task[Mapping[str, Any]] | None = None

    @property
    def is_available(self) -> bool:
        """True if the adapter is loaded or loading."""
        task = self.loading
        return task is not None and not (task.done() and (task.cancelled() or task.exception() is not None))


@dataclass(slots=True)
class _PendingSample:
    """A request and its callback."""

    done: Done
    future: Future[SampleResult]
    is_wanted: bool = True

    def cancel(self) -> None:
        """Cancel the request, here and on the server."""
        self.is_wanted = False
        self.future.cancel()

    def report(self) -> None:
        """Report the result."""
        if self.is_wanted:
            error = self.future.exception()
            if error is None:
                self.done(self.future.result())
            else:
                self.done(error if isinstance(error, Exception) else TinkerError(repr(error)))


class VllmSampler:
    """A `Sampler` that sends requests from an event loop in its own thread."""

    def __init__(self, url: str, api_key: str, folder: Path, answer_sec: float) -> None:
        """Connect to a server. `folder` must be visible to it. Previous engines' adapters in it are deleted.

        Responses that take longer than `answer_sec` are errors.
        """
        self._folder = folder
        for left in folder.glob(f"{PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(answer_sec, connect=CONNECT_SEC, pool=None),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
        )
        self._found: SimpleQueue[_PendingSample] = SimpleQueue()
        self._n_under_way = 0
        self._base: str | None = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel running requests and stop the thread."""
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_SEC)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SEC)
        self._loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.aclose()

    # -- weights

    def load_weights(self, folder: Path) -> VllmWeights:
        if not (folder / peft.CONFIG).is_file():
            raise UserError("the external server samples from adapters only; use a rank of 1 or more")

        def copy(to: Path) -> None:
            for name in (peft.CONFIG, peft.WEIGHTS):
                shutil.copyfile(folder / name, to / name)

        name = f"{PREFIX}{secrets.token_hex(8)}"
        write_folder(self._folder / name, copy)
        weights = VllmWeights(name, self._folder / name)
        weakref.finalize(weights, self._unload, name, weights.folder).atexit = False
        return weights

    def base_weights(self) -> None:
        return None

    def _unload(self, name: str, folder: Path) -> None:
        """Delete an adapter that is no longer referenced."""

        async def unload() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                await self._post("/v1/unload_lora_adapter", {"lora_name": name})
            except TinkerError as error:
                logger.info("%s was not unloaded: %s", name, error)

        if not self._is_closed:
            asyncio.run_coroutine_threadsafe(unload(), self._loop)

    # -- samples

    def read_image(self, image: ImageInput) -> NoReturn:
        raise UserError("samples come from an external server, which gets text only; leave the images out")

    def sample(self, request: SampleRequest, weights: VllmWeights | None, done: Done) -> Callable[[], None]:
        pending = _PendingSample(done, asyncio.run_coroutine_threadsafe(self._ask(request, weights), self._loop))
        self._n_under_way += 1
        pending.future.add_done_callback(lambda _: self._found.put(pending))
        return pending.cancel

    def step(self) -> bool:
        if not self._n_under_way:
            return False
        with contextlib.suppress(Empty):
            pending = self._found.get(timeout=WAIT_SEC)
            while True:
                self._n_under_way -= 1
                pending.report()
                pending = self._found.get_nowait()
        return True

    async def _ask(self, request: SampleRequest, weights: VllmWeights | None) -> SampleResult:
        if weights is None:
            response = await self._post("/v1/completions", body_of(request, await self._base_name()))
        else:
            body = body_of(request, weights.name)
            loaded = await self._load(weights)
            try:
                response = await self._post("/v1/completions", body)
            except _NotFoundError:  # the server was restarted and has lost its adapters
                if weights.loading is loaded:
                    weights.loading = None
                await self._load(weights)
                response = await self._post("/v1/completions", body)
        return result_of(request, response)

    async def _load(self, weights: VllmWeights) -> object:
        """Load an adapter once for all waiting requests, even if one is cancelled. Return the load's identity."""
        if not weights.is_available:
            body = {"lora_name": weights.name, "lora_path": str(weights.folder)}
            weights.loading = asyncio.create_task(self._post("/v1/load_lora_adapter", body))
        loading = weights.loading
        assert loading is not None
        try:
            await asyncio.shield(loading)
        except TinkerError as error:
            raise TinkerError(f"{error}; {HINT}") from error
        return loading

    async def _base_name(self) -> str:
        """Return the name of the base model on the server."""
        if self._base is None:
            models = (await self._request("GET", "/v1/models"))["data"]
            self._base = next(model["id"] for model in models if model.get("parent") is None)
        return self._base

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise TinkerError(
                f"the request to the external server at {self._client.base_url} failed: {error!r}"
            ) from error
        if not response.is_success:
            raise ERRORS_BY_STATUS.get(response.status_code, TinkerError)(
                f"the external server returned {response.status_code} for {response.url.path}: {response.text[:500]}"
            )
        is_json = response.headers.get("content-type", "").startswith("application/json")
        content: Mapping[str, Any] = response.json() if is_json else {}
        return content


class _NotFoundError(TinkerError):
    """The server does not know the model."""


ERRORS_BY_STATUS: Mapping[int, type[TinkerError]] = {400: UserError, 404: _NotFoundError}


def body_of(request: SampleRequest, model: str) -> dict[str, Any]:
    """Convert a request to vLLM's format, with all stop conditions explicit. Greedy requests sample once."""
    params = request.params
    body = {
        "model": model,
        "prompt": list(request.prompt),
        "n": 1 if params.temperature == 0 else request.n_samples,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "stop_token_ids": list(params.stop_tokens),
        "stop": list(params.stop_strings),
        "ignore_eos": True,
        "logprobs": request.n_top_sampled,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
    }
    if params.seed is not None:
        body["seed"] = params.seed
    if request.wants_prompt_logprobs or request.n_top_prompt:
        body["prompt_logprobs"] = request.n_top_prompt
    return body


def result_of(request: SampleRequest, response: Mapping[str, Any]) -> SampleResult:
    """Convert vLLM's response to a result."""
    choices = sorted(response["choices"], key=lambda choice: int(choice["index"]))
    samples = [_sample(choice, request.n_top_sampled) for choice in choices]
    if request.params.temperature == 0:
        samples *= request.n_samples
    scored = choices[0].get("prompt_logprobs")
    if scored is None:
        return SampleResult(samples)
    logprobs = np.full(len(scored), np.nan, np.float32)
    logprobs[1:] = [row[str(token)]["logprob"] for row, token in zip(scored[1:], request.prompt[1:], strict=True)]
    rows = [{int(token): entry["logprob"] for token, entry in (row or {}).items()} for row in scored]
    top = _top(rows, request.n_top_prompt) if request.n_top_prompt else None
    return SampleResult(samples, logprobs if request.wants_prompt_logprobs else None, top)


def _sample(choice: Mapping[str, Any], n_top: int) -> Sample:
    logprobs = choice["logprobs"]
    rows = [
        {int(name.removeprefix("token_id:")): logprob for name, logprob in row.items()}
        for row in logprobs["top_logprobs"]
    ]
    return Sample(
        choice["token_ids"],
        logprobs["token_logprobs"],
        choice["finish_reason"] == "stop",
        _top(rows, n_top) if n_top else None,
    )


def _top(rows: Sequence[Mapping[int, float]], k: int) -> TopLogprobs:
    """Convert rows that hold the `k` most likely tokens and the chosen one. Empty rows stay empty."""
    tokens = np.zeros((len(rows), k), np.int32)
    logprobs = np.full((len(rows), k), np.nan, np.float32)
    for i, row in enumerate(rows):
        if row:
            best = sorted(row.items(), key=lambda pair: -pair[1])[:k]
            tokens[i], logprobs[i] = zip(*best, strict=True)
    return TopLogprobs(tokens, logprobs)
