"""Sampling by a vLLM server, to which adapters are handed as folders, while a backend here trains.

Start it with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 32`. Its log-probs
are those at temperature 1, unless it is told `--logprobs-mode processed_logprobs`. vLLM 0.32 on a CPU dies of log-probs
of a prompt beside another request, where it serves adapters.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
MOST_AT_ONCE = 64
CONNECT_SEC, WAIT_SEC = 10.0, 0.005
HINT = "is it started with --enable-lora, a large enough --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True?"


@dataclass(eq=False)
class VllmWeights:
    """An adapter as the server calls it; the server has it from its first use on."""

    name: str
    folder: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_there: bool = False


class VllmSampler:
    """See `Sampler`."""

    def __init__(self, backend: Backend, url: str, api_key: str, folder: Path) -> None:
        """`folder` is where that server finds adapters, too; those of an engine before this one are deleted."""
        self._backend = backend
        self._folder = folder
        for left in folder.glob(f"{PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        self._client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_SEC),
            limits=httpx.Limits(max_connections=MOST_AT_ONCE),
        )
        self._executor = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="vllm")
        self._found: SimpleQueue[tuple[Done, SampleResult | Exception]] = SimpleQueue()
        self._n_under_way = 0
        self._base: str | None = None
        self._is_closed = False

    def close(self) -> None:
        """End what is under way."""
        self._is_closed = True
        self._client.close()
        self._executor.shutdown(cancel_futures=True)

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

        def forget() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                self._post("/v1/unload_lora_adapter", {"lora_name": name})
            except TinkerError as error:
                logger.info("%s was not unloaded: %s", name, error)

        if not self._is_closed:
            self._executor.submit(forget)

    # -- samples

    def sample(self, asked: SampleRequest, weights: VllmWeights | None, done: Done) -> Callable[[], None]:
        is_cancelled = threading.Event()
        self._n_under_way += 1

        def ask() -> None:
            try:
                result: SampleResult | Exception = self._ask(asked, weights)
            except Exception as error:  # noqa: BLE001 (it is what came of the request)
                result = error
            self._found.put((_nothing if is_cancelled.is_set() else done, result))

        self._executor.submit(ask)
        return is_cancelled.set

    def step(self) -> bool:
        if not self._n_under_way:
            return False
        try:
            done, result = self._found.get(timeout=WAIT_SEC)
        except Empty:
            return True
        self._n_under_way -= 1
        done(result)
        return True

    def _ask(self, asked: SampleRequest, weights: VllmWeights | None) -> SampleResult:
        if weights is None:
            told = self._post("/v1/completions", body_of(asked, self._base_name()))
        else:
            body = body_of(asked, weights.name)
            self._load(weights)
            try:
                told = self._post("/v1/completions", body)
            except _NotFoundError:  # it was started again, and has forgotten its adapters
                weights.is_there = False
                self._load(weights)
                told = self._post("/v1/completions", body)
        return result_of(asked, told)

    def _load(self, weights: VllmWeights) -> None:
        with weights.lock:
            if weights.is_there:
                return
            told = {"lora_name": weights.name, "lora_path": str(weights.folder)}
            try:
                self._post("/v1/load_lora_adapter", told)
            except TinkerError as error:
                raise TinkerError(f"{error}; {HINT}") from error
            weights.is_there = True

    def _base_name(self) -> str:
        """What the base model is called there."""
        if self._base is None:
            answer = self._client.get("/v1/models")
            models = _checked(answer).json()["data"]
            self._base = next(one["id"] for one in models if one.get("parent") is None)
        return self._base

    def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            answer = _checked(self._client.post(path, json=body))
        except httpx.HTTPError as error:
            raise TinkerError(f"the external server at {self._client.base_url} fails: {error!r}") from error
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        told: Mapping[str, Any] = answer.json() if is_json else {}
        return told


class _NotFoundError(TinkerError):
    """There is no such model."""


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    kind = _NotFoundError if answer.status_code == httpx.codes.NOT_FOUND else TinkerError
    raise kind(f"the external server answers {answer.status_code} to {answer.url.path}: {answer.text[:500]}")


def _nothing(_: SampleResult | Exception) -> None:
    """Whoever asked has gone."""


def body_of(asked: SampleRequest, model: str) -> dict[str, Any]:
    """The request in vLLM's terms. All that ends a sample is said in it."""
    params = asked.params
    body = {
        "model": model,
        "prompt": list(asked.prompt),
        "n": asked.n_samples,
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
