"""Where the SDKs differ in what a program has to write. All else here is written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

KEY = "tml-test"


def client_of(made: Any) -> Any:
    """A client: the newest SDK gives a future of it, the others itself."""
    return made.result() if hasattr(made, "result") else made


def new_rest_client(url: str, service: Any) -> Any:
    """A client of lists: the newest SDK has it by itself, the others from a service."""
    if hasattr(tinker, "RestClient"):
        return tinker.RestClient(base_url=url, api_key=KEY)
    return service.create_rest_client()


def close(service: Any) -> None:
    """The end of a session, which older SDKs leave to the server's patience."""
    if hasattr(service, "close"):
        service.close("success").result()


def needs(owner: type, *names: str) -> pytest.MarkDecorator:
    """For a test of calls that older SDKs do not have. The table of the matrix shows each of these gaps."""
    missing = [name for name in names if not hasattr(owner, name)]
    return pytest.mark.skipif(bool(missing), reason=f"there is no {owner.__name__}.{', '.join(missing)}")


def takes(function: Callable[..., Any], parameter: str) -> pytest.MarkDecorator:
    """The same for a parameter."""
    is_there = parameter in inspect.signature(function).parameters
    return pytest.mark.skipif(not is_there, reason=f"{function.__qualname__} takes no {parameter}")


__all__ = ["KEY", "RestClient", "client_of", "close", "needs", "new_rest_client", "takes"]
