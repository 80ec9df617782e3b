"""Who a client is, by its key. Without keys in the settings, everyone is the same user."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tx.tinker.config import TxConfig
from tx.tinker.refusal import Refusal
from tx.tinker.replies import refusal_reply

ANYONE = "local"


def owner_of(headers: Mapping[str, str], config: TxConfig) -> str:
    """The user of a request; `Refusal` 401 where a key is needed and none of ours is there."""
    if not config.api_keys:
        return ANYONE
    given = _given_key(headers)
    if given is None:
        raise Refusal(401, "this server needs an API key: set TINKER_API_KEY")
    for key in config.api_keys:
        if hmac.compare_digest(key.get_secret_value().encode(), given.encode()):
            return f"key-{hashlib.sha256(given.encode()).hexdigest()[:12]}"
    raise Refusal(401, "the API key is none of this server's: check TINKER_API_KEY")


class KeyFirst:
    """ASGI middleware: nothing of a body is read before its sender has shown a key, where keys are needed."""

    def __init__(self, app: ASGIApp, config: TxConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            try:
                owner_of(Headers(scope=scope), self._config)
            except Refusal as refusal:
                await refusal_reply(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _given_key(headers: Mapping[str, str]) -> str | None:
    """From `X-API-Key`, or as a bearer's, or as the password a browser asked for."""
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
