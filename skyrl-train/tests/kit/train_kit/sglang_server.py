"""A server with the part of SGLang's native API that the engine uses, for machines on which SGLang cannot run.

It answers as SGLang 0.5.23 does, and samples with the embedded engine; the tests of `skyrl-train/tests/sglang` expect
the same of SGLang itself. As a program, it takes the options `--model-path` and `--port`, and ignores the others of
SGLang.
"""

import asyncio
import json
import math
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from safetensors.torch import load_file

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams, TokenChunk
from skyrl_train.weight_sync import SyncPlan, send
from skyrl_train.weight_sync.sync import free_port
from train_kit.engines import make_engine


class SGLangServer:
    """The server, in a thread of this process."""

    def __init__(self, path: Path, port: int | None = None, *, is_incremental: bool = False, **options: int) -> None:
        self.address = f"127.0.0.1:{port or free_port()}"
        self.calls: list[tuple[str, Any]] = []  # path and body of all requests but /generate
        self._cached: list[list[int]] = []  # sequences whose keys and values a server would keep
        self._running: set[str] = set()  # names of requests
        self._is_incremental = is_incremental
        self._engine = make_engine(path, **options)()
        self._model = self._engine._model
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(self._app(), port=int(self.address.rpartition(":")[2]), log_level="warning", lifespan="off")
        )
        self._thread = threading.Thread(target=self._uvicorn.run)
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.01)

    def close(self) -> None:
        """End the server, also in the middle of responses."""
        self._uvicorn.force_exit = self._uvicorn.should_exit = True
        self._thread.join()

    def _app(self) -> FastAPI:
        app = FastAPI()
        for method, route in (
            ("GET", self._health),
            ("GET", self._server_info),
            ("POST", self._generate),
            ("POST", self._abort_request),
            ("POST", self._flush_cache),
            ("POST", self._update_weights_from_disk),
            ("POST", self._release_memory_occupation),
            ("POST", self._resume_memory_occupation),
        ):
            app.add_api_route(route.__name__.replace("_", "/", 1), route, methods=[method])
        return app

    @property
    def _max_tokens(self) -> int:
        """The maximum number of tokens of a sequence."""
        return self._engine.info.longest_sequence - 2

    async def _health(self) -> Response:
        await self._engine.generate([EngineRequest([0], SamplingParams(1, temperature=0.0), 0)])
        return Response()

    async def _server_info(self) -> dict[str, Any]:
        return {
            "context_length": None,
            "max_req_input_len": self._max_tokens - 4,
            "enable_memory_saver": True,
            "dtype": "auto",
        }

    async def _generate(self, body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _abort_request(self, body: dict[str, Any]) -> None:
        self.calls.append(("/abort_request", body))
        for rid in [rid for rid in self._running if rid.startswith(body["rid"])]:
            await self._engine.abort(rid)

    async def _flush_cache(self, timeout: float = 0.0) -> Response:
        self.calls.append(("/flush_cache", timeout))
        deadline = time.monotonic() + timeout
        while self._engine._unfinished():
            if time.monotonic() > deadline:
                return PlainTextResponse("Flush cache failed.\n", 400)
            await asyncio.sleep(0.01)
        self._cached.clear()
        return PlainTextResponse("Cache flushed.\n")

    async def _update_weights_from_disk(self, body: dict[str, Any]) -> JSONResponse:
        self.calls.append(("/update_weights_from_disk", body))
        while self._engine._unfinished():
            await asyncio.sleep(0.01)
        folder, version = Path(body["model_path"]), int(body["weight_version"])
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        if missing := dict(self._model.named_parameters()).keys() - tensors.keys():
            return JSONResponse({"success": False, "message": f"missing {min(missing)}"}, 400)
        self._model.load_state_dict(tensors, strict=False)
        plan = SyncPlan(version, "shared", f"sglang-{self.address}")
        send(plan, iter(self._model.named_parameters()))
        await self._engine.receive_weights(plan)
        if body.get("flush_cache", True):
            self._cached.clear()
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def _release_memory_occupation(self, body: dict[str, Any]) -> None:
        self.calls.append(("/release_memory_occupation", body))
        await self._engine.sleep()

    async def _resume_memory_occupation(self, body: dict[str, Any]) -> None:
        self.calls.append(("/resume_memory_occupation", body))
        await self._engine.wake_up("weights" if body["tags"] == ["weights"] else "all")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        params = body["sampling_params"]
        assert body["stream"]
        assert body["return_logprob"]
        n_prompt = len(body["input_ids"])
        if n_prompt >= self._max_tokens - 4:
            message = f"Input length ({n_prompt} tokens) exceeds the maximum allowed length"
            meta = {"finish_reason": {"type": "abort", "message": message}, "completion_tokens": 0}
            yield f"data: {json.dumps({'output_ids': [], 'meta_info': meta})}\n\ndata: [DONE]\n\n"
            return
        sampling = SamplingParams(
            min(params["max_new_tokens"], self._max_tokens - n_prompt),
            temperature=params["temperature"],
            stop_token_ids=tuple(params.get("stop_token_ids", ())) if not params["ignore_eos"] else (),
            ignore_eos=params["ignore_eos"],
            n_top_logprobs=body["top_logprobs_num"],
        )
        request = EngineRequest(body["input_ids"], sampling, params["sampling_seed"], session_id=body["rid"])
        n_cached = max((common_length(request.prompt_ids[:-1], cached) for cached in self._cached), default=0)
        chunks: list[TokenChunk] = []
        self._running.add(body["rid"])
        try:
            async with aclosing(self._engine.stream(request)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    if chunk.result is not None or not sampling.n_top_logprobs:
                        yield self._event(request, chunks, n_cached)
        except EngineError as error:
            if "not finite" not in str(error):
                raise
            chunks.append(TokenChunk([0], [math.nan]))  # SGLang samples a token and reports no log-prob
            yield self._event(request, chunks, n_cached)
        finally:
            self._running.remove(body["rid"])
            await self._engine.end_session(body["rid"])
        self._cached.append(request.prompt_ids + [token_id for chunk in chunks for token_id in chunk.token_ids][:-1])
        yield "data: [DONE]\n\n"

    def _event(self, request: EngineRequest, chunks: list[TokenChunk], n_cached: int) -> str:
        result = chunks[-1].result
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        reason: dict[str, Any] | None = None
        if result is not None and result.stop_reason == "stop":
            reason = {"type": "stop", "matched": token_ids[-1]}
        elif result is not None and result.stop_reason == "abort":
            reason = {"type": "abort", "message": "Aborted"}
        elif result is not None:
            reason = {"type": "length", "length": len(token_ids)}
        start = len(token_ids) - len(chunks[-1].token_ids) if self._is_incremental else 0
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(token_ids),
            "cached_tokens": n_cached,
            "output_token_logprobs": [
                [None if math.isnan(logprob) else logprob, token_id, None]
                for token_id, logprob in list(zip(token_ids, logprobs, strict=True))[start:]
            ],
        }
        if result is not None and result.top_logprobs is not None:
            meta["output_top_logprobs"] = [
                [[value, token_id, None] for token_id, value in top.items()] for top in result.top_logprobs
            ]
        return f"data: {json.dumps({'output_ids': token_ids[start:], 'meta_info': meta})}\n\n"


def common_length(one: list[int], other: list[int]) -> int:
    """Return the number of tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def option(name: str) -> str:
    """Return an option of the command line."""
    return sys.argv[sys.argv.index(name) + 1]


if __name__ == "__main__":
    SGLangServer(Path(option("--model-path")), int(option("--port")))._thread.join()
