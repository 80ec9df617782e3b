"""Two search indexes: by keywords, and by the vectors of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from skyrl_gym.retrieval.corpus import Document

if TYPE_CHECKING:
    import numpy as np

BATCH_SIZE = 64


class Hit(NamedTuple):
    """A document and its score; higher is better."""

    document: Document
    score: float


class Index(Protocol):
    """A thread-safe search index."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the best `topk` documents for each query, best first; fewer if fewer match."""
        ...


class Encoder(Protocol):
    """A text encoder with the interface of the package sentence-transformers."""

    def encode(
        self, sentences: list[str], *, batch_size: int, normalize_embeddings: bool, show_progress_bar: bool
    ) -> np.ndarray:
        """Return vectors (n, d)."""
        ...


class WordIndex:
    """BM25 (Robertson and Zaragoza, 2009) with the package bm25s."""

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s

        self._documents = documents
        self._tokenize = bm25s.tokenize
        self._bm25 = bm25s.BM25()
        words = self._words([document["contents"] for document in documents])
        self._bm25.index(words, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the best `topk` documents for each query that contain at least one of its words."""
        n = min(topk, len(self._documents))
        indices, scores = self._bm25.retrieve(self._words(list(queries)), k=n, show_progress=False)
        return [
            [Hit(self._documents[i], float(score)) for i, score in zip(best, best_scores, strict=True) if score > 0]
            for best, best_scores in zip(indices, scores, strict=True)
        ]

    def _words(self, texts: list[str]) -> list[list[str]]:
        words: list[list[str]] = self._tokenize(texts, return_ids=False, show_progress=False)
        return words


class VectorIndex:
    """Search by the inner product of normalized vectors."""

    def __init__(
        self, documents: Sequence[Document], encoder: Encoder, query_prefix: str = "", document_prefix: str = ""
    ) -> None:
        """Encode the documents. Models such as E5 need the prefixes "query: " and "passage: "."""
        self._documents = documents
        self._encoder = encoder
        self._query_prefix = query_prefix
        self._vectors = self._encode([document_prefix + document["contents"] for document in documents])  # (D, d)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the `topk` documents closest to each query, closest first."""
        scores = self._encode([self._query_prefix + query for query in queries]) @ self._vectors.T  # (Q, D)
        best = (-scores).argsort(axis=1, kind="stable")[:, :topk]
        return [
            [Hit(self._documents[i], float(query_scores[i])) for i in indices]
            for indices, query_scores in zip(best, scores, strict=True)
        ]

    def _encode(self, texts: list[str]) -> np.ndarray:
        return self._encoder.encode(texts, batch_size=BATCH_SIZE, normalize_embeddings=True, show_progress_bar=False)
