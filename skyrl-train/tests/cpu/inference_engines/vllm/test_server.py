"""Requests with images to a vLLM server. The contract suite runs with vLLM itself."""

import io
import json
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from train_kit.vision_models import ask, picture
from transformers import PreTrainedTokenizerBase

from skyrl_gym.images import EncodedImage, read_image
from skyrl_train.errors import EngineError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.vllm.server import VLLMServerEngine, _data_url


class FailingServer(ThreadingHTTPServer):
    """A server whose model answers each request with a status, or with an error event if the status is 200."""

    status = 200
    n_requests = 0


class Handler(BaseHTTPRequestHandler):
    server: FailingServer

    def do_GET(self) -> None:
        self._answer(200, b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/collective_rpc":
            facts = {"context_length": 512, "vocab_size": 512, "eos_ids": [2]}
            self._answer(200, json.dumps({"results": [{"facts": facts, "sampler": "native"}]}).encode())
        else:
            self.server.n_requests += 1
            self._answer(self.server.status, b'data: {"error": "no such image"}\n\n')

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@pytest.fixture
def server() -> Iterator[FailingServer]:
    server = FailingServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def engine(server: FailingServer, vision_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[VLLMServerEngine]:
    engine = VLLMServerEngine(f"127.0.0.1:{server.server_port}", vision_tokenizer)
    yield engine
    await engine.close()


@pytest.mark.parametrize(("status", "n_requests"), [(200, 3), (500, 3), (400, 1), (413, 1)])
async def test_only_failures_of_the_server_are_retried(
    status: int, n_requests: int, server: FailingServer, engine: VLLMServerEngine
) -> None:
    chat, prompt = ChatEncoder(engine._tokenizer), ask(picture(0), "What is it?")
    ids = chat.prompt_ids(prompt)
    server.status = status
    with pytest.raises(EngineError, match="no such image"):
        await engine.generate([EngineRequest(ids, SamplingParams(4), 0, images=tuple(chat.find_spans(ids, prompt)))])
    assert server.n_requests == n_requests


def save(image: Image.Image, kind: str = "PNG", **options: Any) -> EncodedImage:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return read_image(file.getvalue())


def test_only_files_that_may_be_read_differently_are_converted() -> None:
    plain = save(picture(0))
    assert _data_url(plain) == plain.data_url
    orientation, text = Image.Exif(), PngInfo()
    orientation[0x0112] = 3
    text.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="3"/>')
    others = [
        save(picture(0), "JPEG"),
        save(picture(0).convert("RGBA")),
        save(picture(0), transparency=(0, 0, 0)),
        save(picture(0).quantize(4)),
        save(picture(0), exif=orientation),
        save(picture(0), pnginfo=text),
    ]
    for image in others:
        url = _data_url(image)
        assert url != image.data_url
        assert read_image(url) == read_image(image.open())
