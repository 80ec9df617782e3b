"""vLLM behind HTTP: a server started separately with `vllm serve`. This process does not need vLLM.

Two commands start such a server, with our worker extension and open control endpoints: `START_COMMAND` for our sampler,
`NATIVE_COMMAND` for vLLM's own sampler and asynchronous scheduling. Anyone who can reach these endpoints controls the
server, so keep its port inside a trusted network.

The server expands the placeholder of an image itself. So a request has one placeholder for each image, and the server
returns the tokens that it reads:

    ours                <|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>Where is the ball?
    request             <|vision_start|><|image_pad|><|vision_end|>Where is the ball?
    the server reads    <|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>Where is the ball?

If they are not ours, the request fails. This happens if the server's image processor has other settings.
"""

import asyncio
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from skyrl_gym.images import EncodedImage, read_image
from skyrl_train.config.generator import Sampler
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest
from skyrl_train.inference_engines.http import HTTPEngine, RejectedRequest, call_server, server_url
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.inference_engines.scheduled import Output
from skyrl_train.inference_engines.sequence import ActiveSequence
from skyrl_train.inference_engines.stepped import EngineFacts, MemoryPart
from skyrl_train.inference_engines.vllm.wire import (
    EXTENSION,
    MAX_IMAGES,
    N_LEADING,
    NATIVE_LIMITS,
    NATIVE_LOGPROBS,
    as_requested,
    check_results,
    decode_receipts,
    encode_plan,
    encode_request,
    unpack,
)
from skyrl_train.media.processing import load_image_processor
from skyrl_train.media.spans import hide_placeholders
from skyrl_train.weight_sync import Receipt, SyncPlan

NATIVE_COMMAND = (
    f"VLLM_SERVER_DEV_MODE=1 vllm serve <policy> --enable-scale-out --logprobs-mode={NATIVE_LOGPROBS} "
    f"--max-logprobs=-1 --enable-prompt-tokens-details --worker-extension-cls {EXTENSION}"
)
START_COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve <policy> --enable-scale-out --no-async-scheduling "
    f"--max-logprobs=-1 --enable-prompt-tokens-details --worker-extension-cls {EXTENSION}"
)
MAX_DROP_S = 30.0
MAX_RETRIES = 2


class VLLMServerEngine(HTTPEngine):
    """An engine behind a vLLM server. Closing it leaves the server running."""

    GENERATE = "/inference/v1/generate"

    def __init__(
        self, address: str, tokenizer: PreTrainedTokenizerBase, sampler: Sampler | Literal["auto"] = "auto"
    ) -> None:
        """Connect to the server at `address` ("host:port" or a URL), and install our sampler there if it is `seeded`.

        `auto` uses the sampler that the server was started for. The `tokenizer` detects stop strings. Raise EngineError
        if the server does not answer, or was started with neither command above.
        """
        url = server_url(address)
        call_server(url, "GET", "/health")
        prepare = {"method": "skyrl_prepare", "args": [sampler, tokenizer.eos_token_id]}
        try:
            results = call_server(url, "POST", "/collective_rpc", json=prepare)["results"]
        except EngineError as error:
            raise EngineError(f"cannot control the server at {url}; start it with `{START_COMMAND}`") from error
        check_results(results)
        super().__init__(url, EngineFacts(**results[0]["facts"]), tokenizer)
        self._sampler: Sampler = results[0]["sampler"]
        self._limits = NATIVE_LIMITS if self._sampler == "native" else None
        self._last_tokens: dict[str, list[SampledToken]] = {}  # of finished responses that still lack their usage
        self._images = load_image_processor(tokenizer.name_or_path)
        self.info = replace(self.info, reads_images=self._images is not None)
        self._unconfirmed: dict[str, list[int]] = {}  # prompts with images that the server has not returned yet

    def _body(self, request_id: str, sequence: ActiveSequence) -> dict[str, Any]:
        sampling = sequence.sampling
        params = {
            "max_tokens": sequence.max_tokens - len(sequence.token_ids),
            "stop_token_ids": [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_ids)],
            "ignore_eos": True,  # the EOS tokens are among the stop tokens
            "detokenize": False,
        }
        if self._sampler == "seeded":
            params |= {"logprobs": N_LEADING + sampling.n_top_logprobs, "extra_args": encode_request(sequence.request)}
        else:
            n_top = sampling.n_top_logprobs and sampling.n_top_logprobs + 1  # the server counts the sampled token, too
            params |= {"logprobs": n_top, "temperature": sampling.temperature}
        return {
            "sampling_params": params,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._prompt(request_id, sequence),
        }

    def _prompt(self, request_id: str, sequence: ActiveSequence) -> dict[str, Any]:
        """Return the fields of a request with its tokens and images."""
        if self._images is None:
            return {"token_ids": sequence.token_ids}
        spans = sequence.request.images
        token_ids = hide_placeholders(sequence.token_ids, spans, self._images.token_id)
        if not spans:
            return {"token_ids": token_ids}
        self._unconfirmed[request_id] = token_ids
        return {
            "token_ids": self._images.collapse(token_ids, spans),
            "content_parts": [
                {"type": "image_url", "url": _data_url(span.image), "uuid": span.image.digest} for span in spans
            ],
            "return_token_ids": True,
        }

    async def _stream(self, request_id: str, sequence: ActiveSequence, body: Mapping[str, Any]) -> None:
        """Stream one response. Send a request with images again if the server fails before it returns tokens.

        vLLM's front end does not send an image to its core if it believes that the core has the image. This is wrong
        after an aborted request. The core then answers with an error, and gets the image with the next request.
        """
        for _ in range(MAX_RETRIES):
            try:
                return await super()._stream(request_id, sequence, body)
            except RejectedRequest:
                raise
            except EngineError:
                if request_id not in self._unconfirmed:
                    raise
        return await super()._stream(request_id, sequence, body)

    def _read_event(self, request_id: str, sequence: ActiveSequence, event: Mapping[str, Any]) -> Output:
        if "error" in event:
            raise EngineError(f"the vLLM server at {self._url} returned an error: {event['error']}")
        if not event["choices"]:  # the usage, after the last tokens
            details = event["usage"].get("prompt_tokens_details") or {}
            return Output(request_id, self._last_tokens.pop(request_id, []), details.get("cached_tokens"))
        expected = self._unconfirmed.pop(request_id, None)
        if expected is not None and event.get("prompt_token_ids") != expected:
            raise EngineError(
                f"the vLLM server at {self._url} reads other tokens than ours for a prompt with images; start it with "
                "the policy's own image processor, and without --mm-processor-kwargs"
            )
        (choice,) = event["choices"]
        tokens = []
        for position in (choice["logprobs"] or {}).get("content") or []:
            columns = [(position["token_id"], position["logprob"])]
            columns += [(top["token_id"], top["logprob"]) for top in position["top_logprobs"]]
            if self._sampler == "native":
                best = sorted(dict(columns).items(), key=lambda column: -column[1])
                tokens.append(as_requested(unpack([columns[0], *best]), sequence.sampling))
            else:
                tokens.append(unpack(_with_sampled(columns, sequence.request)))
        if choice["finish_reason"] is None:
            return Output(request_id, tokens)
        self._last_tokens[request_id] = tokens
        return Output(request_id, [])

    def _abort(self, request_ids: Sequence[str]) -> None:
        super()._abort(request_ids)
        for request_id in request_ids:
            self._last_tokens.pop(request_id, None)
            self._unconfirmed.pop(request_id, None)

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        if plan.transport == "shared":
            raise EngineError(f"transport=shared cannot reach the server at {self._url}; use transport=auto")
        await self._drop_caches()
        call = {"method": "skyrl_receive_weights", "args": [encode_plan(plan)]}
        # No timeout: both ends of the sync have their own timeouts, and the client watches the server's health.
        answer = await self._request("POST", "/collective_rpc", json=call, timeout_s=None)
        return decode_receipts(answer["results"])

    async def _drop_caches(self) -> None:
        """Drop keys, values and features. The server returns an error until it has noticed aborted requests."""
        try:
            async with asyncio.timeout(MAX_DROP_S):
                while not (await self._request("POST", "/reset_prefix_cache"))["success"]:
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise EngineError(
                f"cannot drop the cache of the server at {self._url}, because it still runs requests after "
                f"{MAX_DROP_S:g} s; use it for one run at a time"
            ) from error
        if self.info.reads_images:
            await self._request("POST", "/reset_encoder_cache")

    async def _release_memory(self) -> None:
        await self._drop_caches()
        if self._facts.can_sleep:
            await self._request("POST", "/sleep", params={"level": 1})

    async def _restore_memory(self, part: MemoryPart) -> None:
        if self._facts.can_sleep:
            await self._request("POST", "/wake_up", params={"tags": part})


def _data_url(image: EncodedImage) -> str:
    """Return a data URL with the pixels that the trainer reads. vLLM decodes some transparent images differently."""
    return (image if _is_plain_png(image) else _convert_to_png(image)).data_url


def _is_plain_png(image: EncodedImage) -> bool:
    """Return True for an opaque RGB file without text or EXIF data, which may contain an orientation."""
    from PIL import Image  # an extra that text models do not need

    file = Image.open(io.BytesIO(image.content))  # reads the header, not the pixels
    has_metadata = any(chunk in image.content for chunk in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"))
    return (file.format, file.mode) == ("PNG", "RGB") and not file.has_transparency_data and not has_metadata


@lru_cache(maxsize=MAX_IMAGES)
def _convert_to_png(image: EncodedImage) -> EncodedImage:
    return read_image(image.open())


def _with_sampled(columns: list[tuple[int, float]], request: EngineRequest) -> list[tuple[int, float]]:
    """Undo how the server rewrites a position's columns: it repeats the first one and merges equal token ids.

    Drop the repeated column. If the sampled token is among the most likely tokens, its column there was merged into the
    first one, so a top column is missing and the sampled token takes its place.
    """
    sampled, others = columns[0], [column for column in columns[1:] if column[0] != columns[0][0]]
    n_top = sum(token_id >= 0 for token_id, _ in others)
    return [sampled, *others, *([sampled] if n_top < request.sampling.n_top_logprobs else [])]
