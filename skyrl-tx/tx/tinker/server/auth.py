"""Identify clients by their API keys. Without configured keys, all clients are the same user."""

import base64
import binascii
import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tx.tinker.config import TxConfig
from tx.tinker.refusal import RefusalError
from tx.tinker.server.body_limit import BODILESS_METHODS, has_body
from tx.tinker.server.replies import refusal_reply

LOCAL_USER = "local"


def owner_of(headers: Mapping[str, str], config: TxConfig) -> str:
    """Return a request's user. Raise `RefusalError` 401 if a key is required and missing or unknown."""
    if not config.api_keys:
        return LOCAL_USER
    key_given = _read_key(headers)
    if key_given is None:
        raise RefusalError(401, "this server needs an API key: set TINKER_API_KEY")
    for key, user in config.users_by_key.items():
        if hmac.compare_digest(key.encode(), key_given.encode()):
            return user
    raise RefusalError(401, "the API key is unknown to this server: check TINKER_API_KEY")


class KeyCheck:
    """ASGI middleware that checks the API key of every request with a body before the body is read.

    Routes check the keys of requests without a body, since some need none.
    """

    def __init__(self, app: ASGIApp, config: TxConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"] not in BODILESS_METHODS or has_body(Headers(scope=scope))):
            try:
                owner_of(Headers(scope=scope), self._config)
            except RefusalError as refusal:
                await refusal_reply(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _read_key(headers: Mapping[str, str]) -> str | None:
    """Read the key from `X-API-Key`, a bearer token, or the password of basic authentication."""
    if key := headers.get("x-api-key"):
        return key
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(rest, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return None
