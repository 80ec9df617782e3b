"""What went wrong with a request, in the shape that OpenAI's clients know."""

from __future__ import annotations

from typing import Any, NoReturn


class RequestError(Exception):
    """A request that gets an error for an answer: `status` tells clients whose fault it is, and whether to ask again.

    Clients built on OpenAI's raise BadRequestError for 400, NotFoundError for 404, InternalServerError for 500 and
    503; the last two they ask again.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """`param` names the field of the request; `code` is for programs to read."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refuse(message: str, *, param: str | None = None, code: str | None = None) -> NoReturn:
    """A mistake of the client's.

    Raises:
        RequestError: always, with status 400.
    """
    raise RequestError(400, message, param=param, code=code)


def unavailable(why: str) -> RequestError:
    """Nobody's mistake: the client may ask again."""
    return RequestError(503, why, code="unavailable")


def unknown_session(session_id: str) -> RequestError:
    """Asking again would not help."""
    message = f"there is no open session {session_id!r}: it has ended, or never began"
    return RequestError(404, message, code="session_not_found")
