"""HTTP interface of the retrieval server.

POST /retrieve {"query": "…", "topk": 3, "return_scores": true} returns {"result": [[{"document": {"id", "contents"},
"score"}, …]]}. Without `return_scores`, it returns bare documents. With a list of "queries", the result has one list
per query. GET /health returns the number of documents. Requests run concurrently, in threads. Requests with more than
`MAX_QUERIES` queries, or a query of more than `MAX_QUERY_CHARS` characters, are rejected.
"""

from typing import Annotated, Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field, StringConstraints
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_gym.retrieval.index import Hit, Index
from skyrl_gym.tools.search import MAX_QUERY_CHARS

MAX_DOCUMENTS = 1000
MAX_QUERIES = 256
MAX_BODY_BYTES = 8 << 20

Query = Annotated[str, StringConstraints(max_length=MAX_QUERY_CHARS)]


class RetrieveRequest(BaseModel):
    """The body of a request."""

    query: Query | None = None
    queries: list[Query] = Field(default=[], max_length=MAX_QUERIES)
    topk: int | None = Field(default=None, ge=1, le=MAX_DOCUMENTS)
    return_scores: bool = False


def create_app(index: Index, n_documents: int, topk: int = 3) -> FastAPI:
    """Create the server's application. `topk` is the default for requests."""
    app = FastAPI(title="Retrieval")
    app.add_middleware(RequestSizeLimit)

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> dict[str, Any]:
        queries = request.queries if request.query is None else [request.query, *request.queries]
        if not queries:
            raise HTTPException(422, "the request has no query; add query or queries")
        results = index.search(queries, request.topk or topk)
        return {"result": [[_format_hit(hit, request.return_scores) for hit in hits] for hits in results]}

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "n_documents": n_documents}

    return app


def _format_hit(hit: Hit, with_score: bool) -> dict[str, Any]:
    return {"document": hit.document, "score": hit.score} if with_score else dict(hit.document)


class RequestSizeLimit:
    """ASGI middleware that rejects a request body larger than `MAX_BODY_BYTES` before it is held in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection."""
        n_bytes = 0

        async def receive_limited() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the request has more than {MAX_BODY_BYTES} bytes; send fewer queries")
            return message

        await self._app(scope, receive_limited if scope["type"] == "http" else receive, send)
