"""The HTTP interface of a retrieval server.

POST /retrieve {"query": "…", "topk": 3, "return_scores": true} returns {"result": [[{"document": {"id", "contents"},
"score"}, …]]}; without `return_scores`, bare documents. With "queries", a list, the result has one list per query.
GET /health returns the number of documents. Requests run concurrently, in threads.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from skyrl_gym.retrieval.index import Hit, Index

MAX_DOCUMENTS = 1000


class RetrieveRequest(BaseModel):
    """The body of a request."""

    query: str | None = None
    queries: list[str] = []
    topk: int | None = Field(default=None, ge=1, le=MAX_DOCUMENTS)
    return_scores: bool = False


def create_app(index: Index, n_documents: int, topk: int = 3) -> FastAPI:
    """Create the server's application; `topk` is the default of requests."""
    app = FastAPI(title="Retrieval")

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
