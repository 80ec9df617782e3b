"""How the tests start servers of vLLM."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.http import call_server
from skyrl_train.inference_engines.sglang.engine import list_arguments
from skyrl_train.inference_engines.vllm.wire import EXTENSION
from skyrl_train.weight_sync.sync import free_port

START_TIMEOUT_S = 200
OURS = {
    "worker_extension_cls": EXTENSION,
    "no_async_scheduling": True,
    "max_logprobs": -1,
    "enable_prompt_tokens_details": True,
    "enable_scale_out": True,
}


class Server:
    """`vllm serve`."""

    def __init__(self, options: dict[str, Any], **environment: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--port={port}", "--host=127.0.0.1"]
        self.process = subprocess.Popen([*command, *list_arguments(options)], env=os.environ | environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(EngineError):
                call_server(self.url, "GET", "/health")
                return
            time.sleep(0.5)
        self.close()
        raise AssertionError("vLLM's server did not start")

    def close(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait(60)
