import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import urllib3
from train_kit.processes import python, wait_until

from examples.search.searchr1_dataset import CORPUS, QUESTIONS, main
from skyrl_gym.envs.exact_match import normalize_answer
from skyrl_gym.retrieval.corpus import read_corpus
from skyrl_gym.retrieval.index import WordIndex
from skyrl_train.dataset.files import read_rows

DOCUMENTS = {document["id"]: document["contents"] for document in read_corpus(CORPUS)}


@pytest.fixture(scope="module")
def search_url() -> Iterator[str]:
    """The URL of a retrieval server for the sample documents, started with the command that the script prints."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    def is_ready() -> bool:
        with suppress(urllib3.exceptions.HTTPError):
            health = urllib3.request("GET", f"http://127.0.0.1:{port}/health", retries=False, timeout=5)
            return bool(health.json()["n_documents"] == len(DOCUMENTS))
        return False

    command = [python(), "-m", "skyrl_gym.retrieval", "--corpus", str(CORPUS), "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            wait_until(is_ready)
            yield f"http://127.0.0.1:{port}/retrieve"
        finally:
            process.terminate()


def test_every_row_of_the_sample_can_be_played(prepare: Any, play: Any, search_url: str) -> None:
    splits = prepare(main, "--source", "sample")
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 90, "validation": 22}
    for row in splits["train"] + splits["validation"]:
        question = row.env_extras["extra_info"]["question"]
        search = f"<think>I do not know.</think><search> {question} </search>"
        for answer in row.env_extras["reward_spec"]["ground_truth"]["target"]:
            assert play(row, search, f"<think>Ah.</think><answer> {answer} </answer>", search_url=search_url) == 1.0
        assert play(row, search, "<answer>Atlantis</answer>", search_url=search_url) == 0.0
        assert play(row, "I do not know.", max_turns=1) == 0.0


def test_every_answer_can_be_found_in_the_documents() -> None:
    """An accepted answer occurs in the question's last document, and a search for the question finds its first."""
    index = WordIndex([{"id": title, "contents": text} for title, text in DOCUMENTS.items()])
    for row in read_rows(str(QUESTIONS)):
        text = f" {normalize_answer(DOCUMENTS[row['documents'][-1]])} "
        assert any(f" {normalize_answer(answer)} " in text for answer in row["golden_answers"]), row
        (results,) = index.search([row["question"]], topk=3)
        assert row["documents"][0] in [document["id"] for document, _ in results], row


def test_documents_and_questions_are_unique() -> None:
    questions = [row["question"] for row in read_rows(str(QUESTIONS))]
    assert len(set(questions)) == len(questions)
    assert len(DOCUMENTS) == len(read_corpus(CORPUS))
    assert all(contents.startswith(f"{title}\n") for title, contents in DOCUMENTS.items())


def hub_row(question: str, answers: list[str]) -> dict[str, Any]:
    """Return a row in the format of nq_hotpotqa_train."""
    return {
        "id": "train_0",
        "question": question,
        "golden_answers": answers,
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Answer it. Question: {question}"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": answers}, "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }


def test_rows_of_the_hub_are_converted(prepare: Any, play: Any, source: Any) -> None:
    train = [hub_row("where is mount fuji", ["Japan", "Honshu"]), hub_row("who wrote it?", ["Mary"])]
    test = [{"question": "what is it?", "golden_answers": ["a name"]}]
    splits = prepare(main, "--source", source(train, test))
    row = splits["train"][0]
    assert [message["role"] for message in row.prompt] == ["system", "user"]
    assert row.prompt[0]["content"] == "You are a helpful and harmless assistant."
    assert row.prompt[1]["content"].endswith("\n\nQuestion: where is mount fuji?")
    assert row.env_class == "search"
    assert row.env_extras == {
        "data_source": "searchR1_nq",
        "reward_spec": {"style": "rule", "ground_truth": {"target": ["Japan", "Honshu"]}},
        "extra_info": {"split": "train", "index": 0, "question": "where is mount fuji?"},
    }
    assert (play(row, "<answer>honshu</answer>"), play(row, "<answer>Fuji</answer>")) == (1.0, 0.0)
    assert splits["validation"][0].data_source == "searchR1_unknown"
    assert play(splits["validation"][0], "<answer>Name</answer>") == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, "it has no 'question'"),
        ({"reward_model": None, "golden_answers": None}, "it has no 'golden_answers'"),
        ({"reward_model": {"style": "rule"}}, "it has no right answers: reward_model={'style': 'rule'}"),
        ({"reward_model": {"ground_truth": {"target": []}}}, "it has no right answers"),
        ({"reward_model": "rule"}, "it has no right answers: reward_model=rule"),
    ],
)
def test_rows_of_another_format_are_refused(change: dict[str, Any], message: str, source: Any, refuse: Any) -> None:
    rows = [hub_row("who?", ["Ann"]) | change]
    assert message in refuse(main, "--source", source(rows, rows))
