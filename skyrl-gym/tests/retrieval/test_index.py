from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gym_kit.corpora import LINES

from skyrl_gym.retrieval.corpus import read_corpus
from skyrl_gym.retrieval.index import VectorIndex, WordIndex


@pytest.fixture
def documents(tmp_path: Path) -> Any:
    (tmp_path / "corpus.jsonl").write_text(LINES, encoding="utf-8")
    return read_corpus(tmp_path / "corpus.jsonl")


class LetterEncoder:
    def encode(self, sentences: list[str], *, normalize_embeddings: bool, **_: Any) -> np.ndarray:
        vectors = np.array([[text.lower().count(chr(97 + i)) for i in range(26)] for text in sentences], dtype=float)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize_embeddings else vectors


def test_indexes_sort_by_score(documents: Any) -> None:
    index = VectorIndex(documents, LetterEncoder(), query_prefix="", document_prefix="")
    (hits,) = index.search([documents[1]["contents"].upper()], 2)
    assert hits[0].document == documents[1]
    assert hits[0].score == pytest.approx(1.0)
    assert hits[0].score > hits[1].score
    (hits,) = WordIndex(documents).search(["tallest volcano in Italy, not a river"], 10)
    assert [hit.document["id"] for hit in hits] == ["etna", "3"]


TEXTS = {
    "iso": "スイスのジュネーブに本部を置く国際標準化機構は規格を作る。",
    "novel": '"It"\nIt is a novel.',
    "singer": '"Beyoncé"\nShe sings.',
    "street": "Die Straße nach Bern.",
    "thai": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย",
    "c": "C, a language.",
}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        *(("国際標準化", "iso"), ("ジュネーブ", "iso"), ("It", "novel"), ("it?", "novel"), ("Beyonce", "singer")),
        *(("BEYONCÉ", "singer"), ("Beyonce\u0301", "singer"), ("STRASSE", "street"), ("เมืองหลวง", "thai"), ("C", "c")),
        *(("Zürich", None), ("猫", None), ("the Who", None), ("the of", None), ("the novel", "novel")),
    ],
)
def test_words_of_all_scripts_are_found(query: str, found: str | None) -> None:
    index = WordIndex([{"id": name, "contents": text} for name, text in TEXTS.items()])
    (hits,) = index.search([query], 1)
    assert [hit.document["id"] for hit in hits] == ([found] if found else [])
