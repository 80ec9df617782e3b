"""A stand-in for a vLLM server. `tests/vllm_server` tests a real one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gym_kit.http_server import Request, serving

CHOICE = {"token_ids": [3], "finish_reason": "length", "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{}]}}
HOLD_SEC = 60


class External(NamedTuple):
    """The address of a server, the requests that it received, and the event that the prompt 14 waits for."""

    url: str
    received: list[Request]
    may_answer: threading.Event

    def bodies(self, path: str) -> list[Any]:
        """Return the bodies that were sent to a path."""
        return [request.body for request in self.received if request.path == path]


@contextmanager
def answering_server() -> Iterator[External]:
    """Run a server that samples the token 3, and refuses the prompt 13."""
    may_answer = threading.Event()

    def answer(request: Request) -> tuple[int, Any]:
        if request.method == "GET":
            return 200, {"data": [{"id": "m"}]}
        prompt = request.body.get("prompt")
        if prompt == [14]:
            may_answer.wait(HOLD_SEC)
        if prompt == [13]:
            return 400, {"error": {"message": "Requested sample logprobs of 32"}}
        return 200, {"choices": [{**CHOICE, "index": i} for i in range(request.body.get("n", 0))]}

    with serving(answer) as (url, received):
        yield External(url, received, may_answer)
