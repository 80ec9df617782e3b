"""What the server answers to a request that it does not accept."""

from __future__ import annotations

from typing import NoReturn

from tx.tinker.types import UserError

BUSY_SEC = 1.0


class Refusal(UserError):
    """With an HTTP status that clients understand: they raise at 400, 401, 404, 410 and 422, and come again after 429.

    409 is never used, since clients repeat it for minutes.
    """

    def __init__(self, status: int, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


def refuse(message: str) -> NoReturn:
    """It is the user's mistake."""
    raise Refusal(400, message)


def not_found(message: str) -> NoReturn:
    """There is no such thing, or it is another user's."""
    raise Refusal(404, message)


def busy(message: str) -> NoReturn:
    """Later, perhaps."""
    raise Refusal(429, message, retry_after=BUSY_SEC)
