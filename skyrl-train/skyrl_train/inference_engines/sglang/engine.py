"""SGLang behind its native server API (version 0.5.23): `/generate`, weights from a folder, memory control.

A run starts the server on this machine, or connects to a running one.

`make test-sglang` runs it against SGLang's server on a CPU, but it has not been run on a GPU yet. All other tests use a
server that imitates SGLang's API and samples with the embedded engine.
"""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError, EngineLostError
from skyrl_train.inference_engines.base import EngineSetup, InferenceEngine, weight_folder
from skyrl_train.inference_engines.http import HTTPEngine, call_server, server_url
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.inference_engines.scheduled import Output, SamplingLimits
from skyrl_train.inference_engines.sequence import ActiveSequence, all_eos_ids
from skyrl_train.inference_engines.stepped import EngineFacts, MemoryPart
from skyrl_train.weight_sync import MirroredReceiver, Receipt, Receiver, SyncPlan, WeightMirror
from skyrl_train.weight_sync.sync import free_port

SHARD_BYTES = 1 << 30
MAX_FLUSH_S = 30.0
ABORT_TIMEOUT_S = 10.0
END_TIMEOUT_S = 20.0
POLL_S = 0.5
OWN_OPTIONS = {"host": "127.0.0.1", "skip_tokenizer_init": True, "enable_memory_saver": True}


class SGLangEngine(HTTPEngine):
    """An engine behind an SGLang server.

    The server draws its own random numbers, so `seed` is passed on but has an effect only if the server was started
    with `--enable-deterministic-inference`. Log-probs are the model's at the request's temperature. SGLang cannot
    report them under penalties or for a truncated distribution, so such requests are rejected.

    Requests with images are rejected, because SGLang 0.5.23 could sample from wrong inputs without an error:

    - It keeps features of images when weights change: `/flush_cache` does not clear `mm_schedule.embedding_cache`.
    - If `BaseMultimodalProcessor` cannot expand the placeholders in our tokens, it decodes and tokenizes them again.

    The server reserves the last tokens of the context, so `info.context_length` is a few tokens below the model's.
    """

    GENERATE = "/generate"
    _limits = SamplingLimits("SGLang", "use generator.backend=vllm")
    _image_fault = (
        "SGLang 0.5.23 keeps image features when weights change, and may tokenize the prompt again; use "
        "generator.backend=hf or vllm"
    )
    HEALTH = "/server_info"  # SGLang's /health generates a token, even while the model's memory is released

    def __init__(
        self,
        address: str,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        weight_folder: Path,
        end_server: Callable[[], None] | None = None,
    ) -> None:
        """Connect to the server at `address` ("host:port" or a URL), which runs the model at `model_path`.

        The `tokenizer` detects stop strings. `weight_folder` is for new weights, at the same path on the server's
        machine. Engines may share it. Closing the engine calls `end_server`, which may block. Raise EngineError if the
        server does not answer or has an unsupported version.
        """
        url = server_url(address)
        info = call_server(url, "GET", "/server_info")
        config = AutoConfig.from_pretrained(model_path).get_text_config()
        if "max_req_input_len" not in info:
            raise EngineError(
                f"{url} is not an SGLang 0.5.23 server: its /server_info reports no max_req_input_len; install that "
                "version"
            )
        n_context = int(info["max_req_input_len"])  # a prompt must be shorter, even one that resumes a response
        try:
            model_eos = GenerationConfig.from_pretrained(model_path).eos_token_id
        except OSError:  # the model has no generation config
            model_eos = config.eos_token_id
        facts = EngineFacts(
            n_context,
            int(config.vocab_size),
            sorted(all_eos_ids(model_eos, tokenizer.eos_token_id)),
            can_sleep=bool(info.get("enable_memory_saver")),
            dtype=info.get("dtype"),  # may be "auto"
        )
        super().__init__(url, facts, tokenizer)
        self._model_path = model_path
        self._weight_folder = weight_folder
        self._weight_mirror = WeightMirror()
        self._end_server = end_server
        self._name = uuid4().hex  # other clients of the server also number their requests

    def _body(self, request_id: str, sequence: ActiveSequence) -> dict[str, Any]:
        sampling = sequence.sampling
        params = {
            "max_new_tokens": sequence.max_tokens - len(sequence.token_ids),
            "temperature": sampling.temperature,
            "stop_token_ids": [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_ids)],
            "ignore_eos": sampling.ignore_eos,  # SGLang then also ignores stop tokens. We end the response ourselves.
            "sampling_seed": sequence.request.seed % 2**31,
            "skip_special_tokens": False,
        }
        return {
            "rid": self._server_id(request_id),
            "input_ids": sequence.token_ids,
            "sampling_params": {name: value for name, value in params.items() if value != []},
            "return_logprob": True,
            "top_logprobs_num": sampling.n_top_logprobs,
            "stream": True,
        }

    def _read_event(self, request_id: str, sequence: ActiveSequence, event: Mapping[str, Any]) -> Output:
        if "error" in event:
            raise EngineError(f"the SGLang server at {self._url} returned an error: {event['error']['message']}")
        meta = event["meta_info"]
        reason = meta["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            message = reason.get("message") or "no reason given"
            raise EngineError(f"the SGLang server at {self._url} aborted a request: {message}")
        # completion_tokens is cumulative, although with --incremental-streaming-output events carry only new tokens
        n_new = meta["completion_tokens"] - sequence.n_received
        if not n_new:
            return Output(request_id, [], meta.get("cached_tokens"))
        sequence.n_received += n_new
        tops = (meta.get("output_top_logprobs") or [])[-n_new:] or [None] * n_new
        choices = []
        for (logprob, token_id, _), top in zip(meta["output_token_logprobs"][-n_new:], tops, strict=True):
            logprob = math.nan if logprob is None else logprob  # JSON has no NaN
            choices.append(
                SampledToken(
                    token_id,
                    logprob,
                    top_logprobs=None if top is None else {other_id: value for value, other_id, _ in top},
                )
            )
        return Output(request_id, choices, meta.get("cached_tokens"))

    def _server_id(self, request_id: str) -> str:
        """Return a request's name on the server. The trailing dash keeps it from being a prefix of another name.

        SGLang aborts all requests whose names start with the given one, so "a-1" would also abort "a-12".
        """
        return f"{self._name}-{request_id}-"

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests explicitly. After a closed connection, the server would continue for 2 s."""
        unfinished = [request_id for request_id in request_ids if request_id in self._streams]
        super()._abort(request_ids)
        for request_id in unfinished:
            self._start_abort(self._abort_on_server(request_id))

    async def _abort_on_server(self, request_id: str) -> None:
        with suppress(EngineError):  # a lost server runs nothing
            abort = {"rid": self._server_id(request_id)}
            await self._request("POST", "/abort_request", json=abort, timeout_s=ABORT_TIMEOUT_S)

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        folder = self._weight_folder / f"version_{plan.version}_{uuid4().hex}"  # other engines also write this version
        receiver = MirroredReceiver(plan, self._weight_mirror)
        try:
            await asyncio.to_thread(write_model, folder, self._model_path, receiver)
            update = {"model_path": str(folder.absolute()), "weight_version": str(plan.version), "flush_cache": False}
            await self._wait_for_aborts()
            try:
                await self._request("POST", "/update_weights_from_disk", json=update, timeout_s=plan.timeout_s)
            except EngineLostError as error:
                raise EngineLostError(
                    f"{error} It had {plan.timeout_s:g} s to load new weights; raise "
                    "generator.weight_sync_timeout_seconds if it needs more time"
                ) from error.__cause__
            await self._flush_cache()  # the update's own flush would not wait until aborted requests have ended
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return receiver.receipt

    async def _flush_cache(self) -> None:
        """Drop all keys and values after the server has aborted the dropped requests."""
        await self._wait_for_aborts()
        await self._request("POST", "/flush_cache", params={"timeout": MAX_FLUSH_S}, timeout_s=2 * MAX_FLUSH_S)

    async def _release_memory(self) -> None:
        await self._flush_cache()
        if self._facts.can_sleep:
            await self._request("POST", "/release_memory_occupation", json={"tags": ["kv_cache", "weights"]})

    async def _restore_memory(self, part: MemoryPart) -> None:
        if self._facts.can_sleep:
            await self._request("POST", "/resume_memory_occupation", json={"tags": [part]})

    async def _shut_down(self) -> None:
        await self._wait_for_aborts()
        await super()._shut_down()
        if self._end_server is not None:
            await self._thread.run(self._end_server)


def write_model(folder: Path, model_path: str, weights: Receiver) -> None:
    """Write a Hugging Face folder from received tensors and the configuration of the model at `model_path`."""
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, torch.Tensor] = {}
    n_shards = n_bytes = 0
    for name, tensor in weights:
        shard[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        n_bytes += tensor.numel() * tensor.element_size()
        if n_bytes >= SHARD_BYTES:
            save_file(shard, folder / f"model-{n_shards:05}.safetensors")
            shard, n_shards, n_bytes = {}, n_shards + 1, 0
    if shard:
        save_file(shard, folder / f"model-{n_shards:05}.safetensors")
    AutoConfig.from_pretrained(model_path).save_pretrained(folder)


def start(setup: EngineSetup) -> InferenceEngine:
    """Start a server on this machine, and connect to it."""
    generator, path = setup.cfg.generator, setup.cfg.trainer.policy.model.path
    options = {
        "model_path": path,
        "dtype": setup.cfg.engine_dtype(has_gpu=torch.cuda.is_available()),
        "tp_size": generator.inference_engine_tensor_parallel_size,
        "pp_size": generator.inference_engine_pipeline_parallel_size,
        "dp_size": generator.inference_engine_data_parallel_size,
        "mem_fraction_static": setup.usable_bytes / setup.total_bytes,
        "max_running_requests": generator.max_num_seqs,
        "chunked_prefill_size": generator.max_num_batched_tokens if generator.enable_chunked_prefill else -1,
        "disable_radix_cache": not generator.enable_prefix_caching,
        "disable_cuda_graph": generator.enforce_eager,
        **generator.engine_options,
    }
    address, end_server = launch_server(options, generator.engine_start_timeout_seconds)
    try:
        return SGLangEngine(address, path, setup.tokenizer, weight_folder(setup.cfg), end_server)
    except BaseException:
        end_server()
        raise


def connect(url: str, setup: EngineSetup) -> InferenceEngine:
    """Connect to a running server."""
    return SGLangEngine(url, setup.cfg.trainer.policy.model.path, setup.tokenizer, weight_folder(setup.cfg))


def launch_server(
    options: Mapping[str, Any],
    start_timeout_s: float,
    command: tuple[str, ...] = (sys.executable, "-m", "sglang.launch_server"),
) -> tuple[str, Callable[[], None]]:
    """Start a server on this machine and wait until it is healthy. Return its address and a function to end it. Blocks.

    `options` are fields of SGLang's `ServerArgs`, such as `model_path`. Raise EngineError if the server ends or is not
    healthy in time, or if `options` has an option that we set ourselves.
    """
    if clashes := sorted((OWN_OPTIONS.keys() | {"port"}) & options.keys()):
        raise EngineError(f"engine_init_kwargs.{clashes[0]} is set by the engine itself; remove it")
    address = f"127.0.0.1:{free_port()}"
    arguments = list_arguments({**OWN_OPTIONS, "port": int(address.rpartition(":")[2]), **options})
    process = subprocess.Popen([*command, *arguments], start_new_session=True)  # so `end` can also kill its workers

    def end() -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)
                return

    deadline = time.monotonic() + start_timeout_s
    try:
        while True:
            if process.poll() is not None:
                raise EngineError(
                    f"SGLang ended with exit status {process.returncode} before it was ready, started with "
                    f"{' '.join(arguments)}; see its output above"
                )
            with suppress(EngineError):
                call_server(f"http://{address}", "GET", "/health")
                return address, end
            if time.monotonic() > deadline:
                raise EngineError(
                    f"SGLang was not ready in {start_timeout_s:g} s; see its output above. If it is still "
                    "loading, raise generator.engine_start_timeout_seconds"
                )
            time.sleep(POLL_S)
    except BaseException:
        end()
        raise


def list_arguments(options: Mapping[str, Any]) -> list[str]:
    """Convert options to command-line arguments. None and False are left out.

    `{"tp_size": 2, "trust_remote_code": True}` becomes `--tp-size 2 --trust-remote-code`.
    """
    arguments = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{name.replace('_', '-')}")
        if value is not True:
            arguments += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return arguments
