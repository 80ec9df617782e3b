"""The HTTP side of a retrieval server.

POST /retrieve {"query": "…", "topk": 3, "return_scores": true}, answered by {"result": [[{"document": {"id",
"contents"}, "score"}, …]]}, and by bare documents without scores; for "queries", a list, a list of documents each.
GET /health says how many documents there are. Requests are answered side by side, in threads.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from skyrl_gym.retrieval.index import Found, Index

MOST_DOCUMENTS = 1000


class RetrieveRequest(BaseModel):
    """What a client asks."""

    query: str | None = None
    queries: list[str] = []
    topk: int | None = Field(default=None, ge=1, le=MOST_DOCUMENTS)
    return_scores: bool = False


def new_app(index: Index, n_documents: int, topk: int = 3) -> FastAPI:
    """The server's application; `topk` documents where a request does not say."""
    app = FastAPI(title="Retrieval")

    @app.post("/retrieve")
    def retrieve(asked: RetrieveRequest) -> dict[str, Any]:
        queries = asked.queries if asked.query is None else [asked.query, *asked.queries]
        if not queries:
            raise HTTPException(422, "there is no query; give query or queries")
        found = index.search(queries, asked.topk or topk)
        return {"result": [[_told(one, asked.return_scores) for one in of_query] for of_query in found]}

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "n_documents": n_documents}

    return app


def _told(found: Found, with_score: bool) -> dict[str, Any]:
    return {"document": found.document, "score": found.score} if with_score else dict(found.document)
