"""Errors for requests that the server does not accept."""

from typing import NoReturn

from tx.tinker.types import UserError

BUSY_SEC = 1.0


class RefusalError(UserError):
    """A request is rejected, with an HTTP status that clients handle: 400, 401, 404, 410 and 422 raise, 429 retries.

    409 is never used, since clients retry it for minutes.
    """

    def __init__(self, status: int, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


def refuse(message: str) -> NoReturn:
    """Reject a request with status 400: the request is invalid."""
    raise RefusalError(400, message)


def not_found(message: str) -> NoReturn:
    """Reject a request with status 404: the object does not exist or belongs to a different user."""
    raise RefusalError(404, message)


def busy(message: str) -> NoReturn:
    """Reject a request with status 429: the client should retry later."""
    raise RefusalError(429, message, retry_after=BUSY_SEC)
