"""Sampling by a vLLM server, to which adapters are handed as folders, while a backend here trains.

Start it with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 32`. Its log-probs
are those at temperature 1, unless it is told `--logprobs-mode processed_logprobs`. vLLM 0.32 on a CPU dies of log-probs
of a prompt beside another request, where it serves adapters.
"""

from __future__ import annotations

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
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import httpx
import numpy as np

from tx.models import peft
from tx.tinker.backends.base import Backend, Done
from tx.tinker.checkpoint_files import write_folder
from tx.tinker.types import Sample, SampleRequest, SampleResult, TinkerError, TopLogprobs, UserError

logger = logging.getLogger(__name__)

PREFIX = "tx-"
MOST_CONNECTIONS = 64
CONNECT_SEC, WAIT_SEC, CLOSE_SEC = 10.0, 0.005, 10.0
HINT = "is it started with --enable-lora, a large enough --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True?"


@dataclass(eq=False)
class VllmWeights:
    """An adapter as the server calls it; the server has it from its first use on."""

    name: str
    folder: Path
    loading: asyncio.Task[Mapping[str, Any]] | None = None

    @property
    def is_there(self) -> bool:
        """Or on its way there."""
        one = self.loading
        return one is not None and not (one.done() and (one.cancelled() or one.exception() is not None))


@dataclass(slots=True)
class _Asked:
    """A request, and who wants to know what comes of it."""

    done: Done
    found: Future[SampleResult]
    is_wanted: bool = True

    def cancel(self) -> None:
        """What is under way ends there, too."""
        self.is_wanted = False
        self.found.cancel()

    def tell(self) -> None:
        """What came of it."""
        if self.is_wanted:
            error = self.found.exception()
            self.done(self.found.result() if error is None else _as_exception(error))


class VllmSampler:
    """See `Sampler`. All that is asked goes through an event loop, in a thread of its own."""

    def __init__(self, backend: Backend, url: str, api_key: str, folder: Path, answer_sec: float) -> None:
        """`folder` is where that server finds adapters, too; those of an engine before this one are deleted.

        An answer that takes longer than `answer_sec` is an error.
        """
        self._backend = backend
        self._folder = folder
        for left in folder.glob(f"{PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(answer_sec, connect=CONNECT_SEC, pool=None),
            limits=httpx.Limits(max_connections=MOST_CONNECTIONS),
        )
        self._found: SimpleQueue[_Asked] = SimpleQueue()
        self._n_under_way = 0
        self._base: str | None = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End what is under way."""
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

    def weights_of(self, model_id: str) -> VllmWeights:
        return self._hand_over(partial(self._backend.save_weights, model_id))

    def load_weights(self, folder: Path) -> VllmWeights:
        def copy(to: Path) -> None:
            for name in (peft.CONFIG, peft.WEIGHTS):
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, to / name)

        return self._hand_over(copy)

    def base_weights(self) -> None:
        return None

    def _hand_over(self, write: Callable[[Path], object]) -> VllmWeights:
        name = f"{PREFIX}{secrets.token_hex(8)}"
        folder = self._folder / name
        write_folder(folder, write)
        if not (folder / peft.CONFIG).is_file():
            shutil.rmtree(folder)
            raise UserError("a model whose parameters are all trained cannot be sampled by the external server")
        weights = VllmWeights(name, folder)
        weakref.finalize(weights, self._forget, name, folder).atexit = False
        return weights

    def _forget(self, name: str, folder: Path) -> None:
        """Nobody has the weights any more."""

        async def forget() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                await self._post("/v1/unload_lora_adapter", {"lora_name": name})
            except TinkerError as error:
                logger.info("%s was not unloaded: %s", name, error)

        if not self._is_closed:
            asyncio.run_coroutine_threadsafe(forget(), self._loop)

    # -- samples

    def sample(self, asked: SampleRequest, weights: VllmWeights | None, done: Done) -> Callable[[], None]:
        one = _Asked(done, asyncio.run_coroutine_threadsafe(self._ask(asked, weights), self._loop))
        self._n_under_way += 1
        one.found.add_done_callback(lambda _: self._found.put(one))
        return one.cancel

    def step(self) -> bool:
        if not self._n_under_way:
            return False
        with contextlib.suppress(Empty):
            self._take(self._found.get(timeout=WAIT_SEC))
            while True:
                self._take(self._found.get_nowait())
        return True

    def _take(self, one: _Asked) -> None:
        self._n_under_way -= 1
        one.tell()

    async def _ask(self, asked: SampleRequest, weights: VllmWeights | None) -> SampleResult:
        if weights is None:
            told = await self._post("/v1/completions", body_of(asked, await self._base_name()))
        else:
            body = body_of(asked, weights.name)
            loaded = await self._load(weights)
            try:
                told = await self._post("/v1/completions", body)
            except _NotFoundError:  # it was started again, and has forgotten its adapters
                if weights.loading is loaded:
                    weights.loading = None
                await self._load(weights)
                told = await self._post("/v1/completions", body)
        return result_of(asked, told)

    async def _load(self, weights: VllmWeights) -> object:
        """Once for all who ask, whoever of them is cancelled; which time it was."""
        if not weights.is_there:
            told = {"lora_name": weights.name, "lora_path": str(weights.folder)}
            weights.loading = asyncio.create_task(self._post("/v1/load_lora_adapter", told))
        loading = weights.loading
        assert loading is not None
        try:
            await asyncio.shield(loading)
        except TinkerError as error:
            raise TinkerError(f"{error}; {HINT}") from error
        return loading

    async def _base_name(self) -> str:
        """What the base model is called there."""
        if self._base is None:
            models = (await self._request("GET", "/v1/models"))["data"]
            self._base = next(one["id"] for one in models if one.get("parent") is None)
        return self._base

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        try:
            answer = _checked(await self._client.request(method, path, json=body))
        except httpx.HTTPError as error:
            raise TinkerError(f"the external server at {self._client.base_url} fails: {error!r}") from error
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        told: Mapping[str, Any] = answer.json() if is_json else {}
        return told


class _NotFoundError(TinkerError):
    """There is no such model."""


KINDS: Mapping[int, type[TinkerError]] = {400: UserError, 404: _NotFoundError}


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    raise KINDS.get(answer.status_code, TinkerError)(
        f"the external server answers {answer.status_code} to {answer.url.path}: {answer.text[:500]}"
    )


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else TinkerError(repr(error))


def body_of(asked: SampleRequest, model: str) -> dict[str, Any]:
    """The request in vLLM's terms. All that ends a sample is said in it. Of the likeliest, it samples one at a time."""
    params = asked.params
    body = {
        "model": model,
        "prompt": list(asked.prompt),
        "n": 1 if params.temperature == 0 else asked.n_samples,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "stop_token_ids": list(params.stop_tokens),
        "stop": list(params.stop_strings),
        "ignore_eos": True,
        "logprobs": asked.n_top_sampled,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
    }
    if params.seed is not None:
        body["seed"] = params.seed
    if asked.wants_prompt_logprobs or asked.n_top_prompt:
        body["prompt_logprobs"] = asked.n_top_prompt
    return body


def result_of(asked: SampleRequest, told: Mapping[str, Any]) -> SampleResult:
    """The answer in ours."""
    choices = sorted(told["choices"], key=lambda one: int(one["index"]))
    samples = [_sample(one, asked.n_top_sampled) for one in choices]
    if asked.params.temperature == 0:
        samples *= asked.n_samples
    scored = choices[0].get("prompt_logprobs")
    if scored is None:
        return SampleResult(samples)
    logprobs = np.full(len(scored), np.nan, np.float32)
    logprobs[1:] = [one[str(token)]["logprob"] for one, token in zip(scored[1:], asked.prompt[1:], strict=True)]
    rows = [{int(token): one["logprob"] for token, one in (row or {}).items()} for row in scored]
    top = _top(rows, asked.n_top_prompt) if asked.n_top_prompt else None
    return SampleResult(samples, logprobs if asked.wants_prompt_logprobs else None, top)


def _sample(choice: Mapping[str, Any], n_top: int) -> Sample:
    said = choice["logprobs"]
    rows = [{int(name.removeprefix("token_id:")): one for name, one in row.items()} for row in said["top_logprobs"]]
    return Sample(
        choice["token_ids"],
        said["token_logprobs"],
        choice["finish_reason"] == "stop",
        _top(rows, n_top) if n_top else None,
    )


def _top(rows: Sequence[Mapping[int, float]], k: int) -> TopLogprobs:
    """Of rows that have what was chosen beside the `k` likeliest; an empty one is of no position."""
    tokens = np.zeros((len(rows), k), np.int32)
    logprobs = np.full((len(rows), k), np.nan, np.float32)
    for i, row in enumerate(rows):
        if row:
            best = sorted(row.items(), key=lambda pair: -pair[1])[:k]
            tokens[i], logprobs[i] = zip(*best, strict=True)
    return TopLogprobs(tokens, logprobs)
