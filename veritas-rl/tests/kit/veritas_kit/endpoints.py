"""A model behind an OpenAI-compatible endpoint, whose replies the test chooses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gym_kit.http_server import Request, chat_completion, serving


@dataclass
class ServedModel:
    """A model that answers with `reply(prompt)`; a number is the status of an error."""

    url: str
    requests: list[Request]
    reply: Callable[[str], str | int]

    @property
    def flags(self) -> list[str]:
        """Flags of the tools that call a model."""
        return ["--base-url", f"{self.url}/v1", "--model", "tiny", "--max-retries", "0"]


@contextmanager
def serving_model() -> Iterator[ServedModel]:
    """Serve a model, which first explains everything with the same sentence."""

    def answer(request: Request) -> tuple[int, Any]:
        reply = model.reply(request.body["messages"][-1]["content"])
        return (reply, {"error": "no"}) if isinstance(reply, int) else (200, chat_completion(reply))

    with serving(answer) as (url, requests):
        model = ServedModel(url, requests, lambda prompt: "Because it is so.")
        yield model
