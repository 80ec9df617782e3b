"""Two ways to find documents: by their words, or by the meaning that an encoder gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from skyrl_gym.retrieval.corpus import Document

if TYPE_CHECKING:
    import numpy as np

BATCH_SIZE = 64


class Found(NamedTuple):
    """A document, and how well it answers: higher is better."""

    document: Document
    score: float


class Index(Protocol):
    """Finds documents. Calls may come from several threads at once."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Found]]:
        """The best `topk` documents for each query, best first; fewer where fewer answer at all."""
        ...


class Encoder(Protocol):
    """What makes vectors of texts, as the package sentence-transformers has it."""

    def encode(
        self, sentences: list[str], *, batch_size: int, normalize_embeddings: bool, show_progress_bar: bool
    ) -> np.ndarray:
        """Vectors (n, d)."""
        ...


class WordIndex:
    """BM25 (Robertson and Zaragoza, 2009), by the package bm25s."""

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s

        self._documents = documents
        self._tokenize = bm25s.tokenize
        self._bm25 = bm25s.BM25()
        words = self._words([document["contents"] for document in documents])
        self._bm25.index(words, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Found]]:
        """See `Index`. A document that has none of the words is not found."""
        n = min(topk, len(self._documents))
        numbers, scores = self._bm25.retrieve(self._words(list(queries)), k=n, show_progress=False)
        return [
            [Found(self._documents[i], float(score)) for i, score in zip(of_query, of_scores, strict=True) if score > 0]
            for of_query, of_scores in zip(numbers, scores, strict=True)
        ]

    def _words(self, texts: list[str]) -> list[list[str]]:
        words: list[list[str]] = self._tokenize(texts, return_ids=False, show_progress=False)
        return words


class VectorIndex:
    """The inner product of normalised vectors."""

    def __init__(
        self, documents: Sequence[Document], encoder: Encoder, query_prefix: str = "", document_prefix: str = ""
    ) -> None:
        """Models such as E5 want to be told which texts are queries: "query: " and "passage: "."""
        self._documents = documents
        self._encoder = encoder
        self._query_prefix = query_prefix
        self._vectors = self._encode([document_prefix + document["contents"] for document in documents])  # (D, d)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Found]]:
        """See `Index`."""
        scores = self._encode([self._query_prefix + query for query in queries]) @ self._vectors.T  # (Q, D)
        best = (-scores).argsort(axis=1, kind="stable")[:, :topk]
        return [
            [Found(self._documents[i], float(of_query[i])) for i in numbers]
            for numbers, of_query in zip(best, scores, strict=True)
        ]

    def _encode(self, texts: list[str]) -> np.ndarray:
        return self._encoder.encode(texts, batch_size=BATCH_SIZE, normalize_embeddings=True, show_progress_bar=False)
