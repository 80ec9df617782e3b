import gzip
from pathlib import Path

import pytest
from gym_kit.corpora import LINES

from skyrl_gym.retrieval.corpus import read_corpus


def test_corpus_may_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(f"{LINES}\n\n", encoding="utf-8")
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    documents = read_corpus(tmp_path / "corpus.jsonl")
    assert [document["id"] for document in documents] == ["fuji", "etna", "3"]
    assert read_corpus(tmp_path / "corpus.jsonl.gz") == documents


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no documents"),
        ('{"contents": "a"}\n{', "line 2 of the corpus .* is not JSON"),
        ("[1]", "line 1 of the corpus .* is not an object"),
        ('{"title": "a"}', "line 1 of the corpus .* has no text; its keys are title"),
    ],
)
def test_invalid_corpus_raises(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_corpus(file)
