"""API differences between the SDKs."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

KEY = "tml-test"


def client_of(made: Any) -> Any:
    """Return a client: the newest SDK creates a future of it."""
    return made.result() if hasattr(made, "result") else made


def new_rest_client(url: str, service: Any) -> Any:
    """Return a REST client: the newest SDK creates it directly, others from a service."""
    if hasattr(tinker, "RestClient"):
        return tinker.RestClient(base_url=url, api_key=KEY)
    return service.create_rest_client()


def close(service: Any) -> None:
    """End the session; older SDKs leave this to the server's timeout."""
    if hasattr(service, "close"):
        service.close("success").result()


def needs(owner: type, *names: str) -> pytest.MarkDecorator:
    """Skip a test if the SDK lacks a method. The compatibility table shows these gaps."""
    missing = [name for name in names if not hasattr(owner, name)]
    return pytest.mark.skipif(bool(missing), reason=f"there is no {owner.__name__}.{', '.join(missing)}")


def takes(function: Callable[..., Any], parameter: str) -> pytest.MarkDecorator:
    """Skip a test if the SDK lacks a parameter."""
    is_there = parameter in inspect.signature(function).parameters
    return pytest.mark.skipif(not is_there, reason=f"{function.__qualname__} takes no {parameter}")


__all__ = ["KEY", "RestClient", "client_of", "close", "needs", "new_rest_client", "takes"]
