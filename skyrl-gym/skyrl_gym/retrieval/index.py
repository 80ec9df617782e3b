"""Search indexes: keywords (BM25), and vectors of a text encoder."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from skyrl_gym.retrieval.corpus import Document

if TYPE_CHECKING:
    import numpy as np

BATCH_SIZE = 64

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
_RUN = re.compile(rf"([{_UNSPACED}]+)|[^\W{_UNSPACED}]+")
_ACCENTS = re.compile("[\u0300-\u036f]")


def split_words(text: str) -> Iterator[str]:
    """Split a text into words for `WordIndex`, folding case and accents.

    Chinese, Japanese, Korean, Thai and similar scripts are split into characters and pairs of characters, because
    spaces do not separate each word.

    >>> list(split_words("Café Fuji, 富士"))
    ['cafe', 'fuji', '富', '士', '富士']
    """
    folded = unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFKD", text.casefold())))
    for run in _RUN.finditer(folded):
        if run[1] is None:
            yield run[0]
        else:
            yield from run[1]
            yield from map("".join, zip(run[1], run[1][1:], strict=False))


class Hit(NamedTuple):
    """A document and its score. Higher is better."""

    document: Document
    score: float


class Index(Protocol):
    """A thread-safe search index."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the `topk` best documents for each query, best first. Fewer are returned if fewer match."""


class Encoder(Protocol):
    """A text encoder with the interface of the package sentence-transformers."""

    def encode(
        self, sentences: list[str], *, batch_size: int, normalize_embeddings: bool, show_progress_bar: bool
    ) -> np.ndarray:
        """Return vectors (n, d)."""


class WordIndex:
    """BM25 (Robertson and Zaragoza, 2009) with the package bm25s."""

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s
        from bm25s.stopwords import STOPWORDS_EN

        self._documents = documents
        self._stop_words = frozenset(STOPWORDS_EN)
        self._bm25 = bm25s.BM25()
        texts = (document["contents"] for document in documents)
        words = [[*split_words(text), _title(text.partition("\n")[0])] for text in texts]
        self._bm25.index(words, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return, for each query, the `topk` best documents that contain at least one of its words.

        English stop words are ignored. A query of stop words alone, such as "It", finds documents with that title.
        """
        n = min(topk, len(self._documents))
        words = [list(split_words(query)) for query in queries]
        words = [
            [word for word in query if word not in self._stop_words] or [_title(text)]
            for text, query in zip(queries, words, strict=True)
        ]
        indices, scores = self._bm25.retrieve(words, k=n, show_progress=False)
        return [
            [Hit(self._documents[i], float(score)) for i, score in zip(best, best_scores, strict=True) if score > 0]
            for best, best_scores in zip(indices, scores, strict=True)
        ]


def _title(text: str) -> str:
    """Return one index word for a whole title: its words, joined by spaces after a newline that no other word has."""
    return "\n" + " ".join(split_words(text))


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
        """Return the `topk` closest documents to each query, closest first."""
        scores = self._encode([self._query_prefix + query for query in queries]) @ self._vectors.T  # (Q, D)
        best = (-scores).argsort(axis=1, kind="stable")[:, :topk]
        return [
            [Hit(self._documents[i], float(query_scores[i])) for i in indices]
            for indices, query_scores in zip(best, scores, strict=True)
        ]

    def _encode(self, texts: list[str]) -> np.ndarray:
        return self._encoder.encode(texts, batch_size=BATCH_SIZE, normalize_embeddings=True, show_progress_bar=False)
