"""Arguments that several tools share."""

import argparse
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_gym.chat_endpoint import ChatEndpoint, EndpointConfig
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.tasks import FAMILIES

FOLDER = Path(__file__).parent
"""Results are under this folder, by family: `<env>/generated/`, `<env>/reasoned/`, `<env>/results/`."""


def family_folder(path: Path) -> Path:
    """Return the results folder for an input file: its family's folder, or else the file's own."""
    return path.parent.parent if path.parent.name in ("generated", "reasoned") else path.parent


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def not_negative(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def ratio(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to 1")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} must be a JSON object, such as \'{{"task_types": ["sudoku"]}}\'')
    return value


def add_family(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add `--env` and `--adapter-config`."""
    parser.add_argument("--env", default=default, required=default is None, help=f"task family: {', '.join(FAMILIES)}")
    parser.add_argument("--adapter-config", type=json_object, default={}, help="options of the family, as JSON")


def add_endpoint(parser: argparse.ArgumentParser, *, model: str | None, base_url: str, timeout: float) -> None:
    """Add the flags for an OpenAI-compatible endpoint."""
    add = parser.add_argument
    add("--base-url", default=base_url, help="URL before /chat/completions (default: %(default)s)")
    default = "" if model is None else " (default: %(default)s)"
    add("--model", default=model, required=model is None, help=f"the model's name at the endpoint{default}")
    add("--api-key-env", default="", help="environment variable that holds the key; empty for none")
    add("--timeout", type=float, default=timeout, help="seconds of one request (default: %(default)s)")
    add("--max-retries", type=not_negative, default=3, help="retries of a failed request (default: %(default)s)")
    add("--max-concurrent", type=positive, default=5, help="requests at a time (default: %(default)s)")
    add("--max-tokens", type=positive, default=4096, help="maximum number of tokens in a reply (default: %(default)s)")


def chat_model(args: argparse.Namespace, temperature: float) -> Callable[[ConversationType], str]:
    """Return a function that queries the endpoint, with one connection per thread."""
    config = EndpointConfig(
        base_url=args.base_url,
        model=args.model,
        api_key_env=args.api_key_env,
        sampling_params={"temperature": temperature, "max_tokens": args.max_tokens},
        timeout_seconds=args.timeout,
        n_attempts=args.max_retries + 1,
    )
    connections = threading.local()

    def ask(messages: ConversationType) -> str:
        if not hasattr(connections, "endpoint"):
            connections.endpoint = ChatEndpoint(config)
        reply: str = connections.endpoint(messages)
        return reply

    return ask
