"""The prompt dataset."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl_train.dataset.files import write_jsonl
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.errors import DataError

LONG = 10_000


def ask(content: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], **columns}


def write_file(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    write_jsonl(folder / name, rows)
    return str(folder / name)


def test_columns_become_extras_and_sources_are_joined_in_order(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    first = write_file(
        tmp_path, [ask("a", env_class="catch", data_source="games/catch", reward_spec={"mode": "shaped"})]
    )
    second = write_file(tmp_path, [ask("b", extra_info={"index": 7}), ask("c", data_source=None)], "more.jsonl")
    rows = list(PromptDataset([first, second], tiny_tokenizer, LONG))
    assert [row.prompt for row in rows] == [ask(content)["prompt"] for content in "abc"]
    assert [row.uid for row in rows] == ["0", "1", "2"]
    assert [row.env_class for row in rows] == ["catch", None, None]
    assert [row.data_source for row in rows] == ["games/catch", "unknown", "unknown"]
    assert [row.env_extras for row in rows] == [
        {"data_source": "games/catch", "reward_spec": {"mode": "shaped"}},
        {"extra_info": {"index": 7}},
        {"data_source": None},
    ]
    assert len(PromptDataset(first, tiny_tokenizer, LONG)) == 1


def test_the_length_limit_is_exact_and_includes_the_assistant_header(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [ask("1" * n) for n in (3, 5, 4)]
    n_tokens = len(
        tiny_tokenizer.apply_chat_template(
            rows[2]["prompt"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
    )
    source = write_file(tmp_path, rows)
    with caplog.at_level(logging.INFO):
        kept = PromptDataset(source, tiny_tokenizer, n_tokens)
    assert [(row.uid, row.prompt[0]["content"]) for row in kept] == [("0", "111"), ("1", "1111")]
    assert f"2 of 3 rows have at most {n_tokens} tokens" in caplog.text
    assert len(PromptDataset(source, tiny_tokenizer, n_tokens - 1)) == 1
    assert len(PromptDataset(source, tiny_tokenizer, n_tokens + 1)) == 3
    with pytest.raises(DataError, match=rf"all 3 prompts .*max_prompt_length=2 .*shortest has {n_tokens - 1}\)"):
        PromptDataset(source, tiny_tokenizer, 2)


def test_column_names_are_configurable(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    source = write_file(tmp_path, [{"question": ask("a")["prompt"], "env": "catch", "prompt": "kept"}])
    (row,) = PromptDataset(source, tiny_tokenizer, LONG, prompt_key="question", env_class_key="env")
    assert (row.env_class, row.env_extras) == ("catch", {"prompt": "kept"})


@pytest.mark.parametrize(
    ("bad_row", "reason"),
    [
        ({"question": "a"}, "has no 'prompt'; its columns are question. A prompt is a list of messages"),
        ({"prompt": "What is 2 + 2?"}, "prompt='What is 2 \\+ 2\\?' is not a list of messages"),
        ({"prompt": []}, "is not a list of messages"),
        ({"prompt": None}, "prompt=null is not a list of messages; write"),
        ({"prompt": [{"content": "no role"}]}, "message 0 of prompt lacks a role or a content: {'content': 'no role'}"),
        ({"prompt": [*ask("a")["prompt"], {"role": "user"}]}, "message 1 of prompt lacks a role or a content"),
        ({"prompt": [{"role": "user", "content": None}]}, "message 0 of prompt lacks a role or a content"),
        ({"prompt": [{"role": "user", "content": 5}]}, "chat template refuses a prompt with the roles user"),
        (ask("a", env_class=5), "env_class=5 is a int; write the name of an environment"),
        (ask("a", env_class=["catch"]), "env_class=\\['catch'\\] is a list; write the name of an environment"),
        (ask("a", deep=json.loads("[" * 100 + "]" * 100)), "it is nested too deeply; flatten its lists"),
    ],
)
def test_a_row_without_a_chat_prompt_is_named(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, bad_row: dict[str, Any], reason: str
) -> None:
    source = write_file(tmp_path, [ask("fine"), bad_row])
    with pytest.raises(DataError, match=f"row 1 of {source}.*{reason}"):
        PromptDataset(source, tiny_tokenizer, LONG)


def test_half_characters_of_a_prompt_are_replaced_with_one_warning(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps(ask(text, answer=text)) for text in ("a", "b\ud83d", "\udc00")))
    rows = list(PromptDataset(str(source), tiny_tokenizer, LONG))
    assert [row.prompt[0]["content"] for row in rows] == [row.env_extras["answer"] for row in rows] == ["a", "b?", "?"]
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.endswith(f'are replaced by "?" in 2 rows, the first: row 1 of {source}')


def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    for name, text in (("a.json", "[" * 10**5), ("b.jsonl", '{"a": ' + "[" * 10**5)):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=f"{name}: its JSON is nested too deeply"):
            PromptDataset(str(tmp_path / name), tiny_tokenizer, LONG)


def test_a_file_without_rows_is_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    source = write_file(tmp_path, [])
    with pytest.raises(DataError, match=f"no rows in {source}"):
        PromptDataset(source, tiny_tokenizer, LONG)


def test_a_fingerprint_depends_on_the_rows_and_not_on_the_file_name(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    fingerprints = []
    for name, content in (("a", "1"), ("b", "1"), ("c", "2")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"prompt": [{"role": "user", "content": content}]}))
        fingerprints.append(PromptDataset(str(path), tiny_tokenizer, max_prompt_length=100).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
