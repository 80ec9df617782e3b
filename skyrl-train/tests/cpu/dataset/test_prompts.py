"""The prompt dataset, and the order in which training goes through it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from skyrl_train.dataset.files import write_jsonl
from skyrl_train.dataset.prompts import PromptDataset, ShuffledPrompts
from skyrl_train.errors import DataError
from skyrl_train.types import PromptRow

LONG = 10_000


def ask(content: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], **columns}


def file_of(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    write_jsonl(folder / name, rows)
    return str(folder / name)


class Numbers:
    """As much of a dataset as shuffling needs: rows 0 to n - 1."""

    def __init__(self, n_rows: int, fingerprint: str = "numbers") -> None:
        self._n_rows = n_rows
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self._n_rows

    def __getitem__(self, index: int) -> PromptRow:
        return PromptRow(str(index), [], None, {})


def shuffled(n_rows: int, batch_size: int, seed: int = 0) -> ShuffledPrompts:
    return ShuffledPrompts(Numbers(n_rows), batch_size, seed)  # type: ignore[arg-type]


def uids(prompts: ShuffledPrompts, n_batches: int) -> list[list[str]]:
    return [[row.uid for row in prompts.next_batch()] for _ in range(n_batches)]


def test_columns_become_extras_and_sources_are_joined_in_order(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    first = file_of(tmp_path, [ask("a", env_class="catch", data_source="games/catch", reward_spec={"mode": "shaped"})])
    second = file_of(tmp_path, [ask("b", extra_info={"index": 7}), ask("c", data_source=None)], "more.jsonl")
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


def test_the_length_limit_is_exact_and_counts_the_assistants_header(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [ask("1" * n) for n in (3, 5, 4)]
    n_tokens = len(
        tiny_tokenizer.apply_chat_template(
            rows[2]["prompt"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
    )
    source = file_of(tmp_path, rows)
    with caplog.at_level(logging.INFO):
        kept = PromptDataset(source, tiny_tokenizer, n_tokens)
    assert [(row.uid, row.prompt[0]["content"]) for row in kept] == [("0", "111"), ("1", "1111")]
    assert f"2 of 3 rows have at most {n_tokens} tokens" in caplog.text
    assert len(PromptDataset(source, tiny_tokenizer, n_tokens - 1)) == 1
    assert len(PromptDataset(source, tiny_tokenizer, n_tokens + 1)) == 3
    with pytest.raises(DataError, match=rf"all 3 prompts .*max_prompt_length=2 .*shortest has {n_tokens - 1}\)"):
        PromptDataset(source, tiny_tokenizer, 2)


def test_other_column_names(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    source = file_of(tmp_path, [{"question": ask("a")["prompt"], "env": "catch", "prompt": "kept"}])
    (row,) = PromptDataset(source, tiny_tokenizer, LONG, prompt_key="question", env_class_key="env")
    assert (row.env_class, row.env_extras) == ("catch", {"prompt": "kept"})


@pytest.mark.parametrize(
    ("bad_row", "reason"),
    [
        ({"question": "a"}, "has no 'prompt'; its columns are question. A prompt is a list of messages"),
        ({"prompt": "What is 2 + 2?"}, "prompt='What is 2 \\+ 2\\?' is not a list of messages"),
        ({"prompt": []}, "is not a list of messages"),
        ({"prompt": [{"content": "no role"}]}, "is not a list of messages"),
        ({"prompt": [{"role": "user"}]}, "is not a list of messages"),
        ({"prompt": [{"role": "user", "content": None}]}, "chat template refuses a prompt with the roles user"),
    ],
)
def test_a_row_without_a_chat_prompt_is_named(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, bad_row: dict[str, Any], reason: str
) -> None:
    source = file_of(tmp_path, [ask("fine"), bad_row])
    with pytest.raises(DataError, match=f"row 1 of {source}.*{reason}"):
        PromptDataset(source, tiny_tokenizer, LONG)


def test_no_rows_at_all(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    source = file_of(tmp_path, [])
    with pytest.raises(DataError, match=f"no rows in {source}"):
        PromptDataset(source, tiny_tokenizer, LONG)


@given(n_rows=st.integers(1, 12), batch_size=st.integers(1, 12), seed=st.integers(0, 2**40))
def test_an_epoch_is_a_permutation_without_its_tail(n_rows: int, batch_size: int, seed: int) -> None:
    batch_size = min(batch_size, n_rows)
    prompts = shuffled(n_rows, batch_size, seed)
    assert prompts.batches_per_epoch == n_rows // batch_size
    for _ in range(3):
        batches = uids(prompts, prompts.batches_per_epoch)
        assert {len(batch) for batch in batches} == {batch_size}
        drawn = [uid for batch in batches for uid in batch]
        assert len(set(drawn)) == len(drawn) == n_rows - n_rows % batch_size


def test_orders_differ_between_epochs_and_seeds_and_repeat_with_the_seed() -> None:
    first, again, other = shuffled(50, 50, seed=3), shuffled(50, 50, seed=3), shuffled(50, 50, seed=4)
    epochs = uids(first, 4)
    assert epochs == uids(again, 4)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert uids(other, 1)[0] != epochs[0]


def test_drawing_an_order_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    shuffled(5, 2).next_batch()
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=50)
@given(n_rows=st.integers(1, 9), batch_size=st.integers(1, 9), n_before=st.integers(0, 12), seed=st.integers(0, 9))
def test_a_restored_position_goes_on_with_the_next_batch(
    n_rows: int, batch_size: int, n_before: int, seed: int
) -> None:
    batch_size = min(batch_size, n_rows)
    original, resumed = shuffled(n_rows, batch_size, seed), shuffled(n_rows, batch_size, seed)
    uids(original, n_before)
    resumed.load_state_dict(original.state_dict())
    assert resumed.state_dict() == original.state_dict()
    assert uids(resumed, 5) == uids(original, 5)


@pytest.mark.parametrize(("old_size", "new_size"), [(2, 5), (5, 2), (1, 10)])
def test_with_another_batch_size_the_epoch_goes_on_with_the_rows_that_are_left(old_size: int, new_size: int) -> None:
    old, resumed = shuffled(10, old_size), shuffled(10, new_size)
    order = uids(shuffled(10, 10), 1)[0]
    uids(old, 1)
    resumed.load_state_dict(old.state_dict())
    (batch,) = uids(resumed, 1)
    assert batch == (order[old_size : old_size + new_size] if new_size < 10 else uids(shuffled(10, 10), 2)[1])
    assert all(len(batch) == new_size for batch in uids(resumed, 20))


@pytest.mark.parametrize(("n_rows", "seed", "difference"), [(11, 0, "n_rows=10 .* n_rows=11"), (10, 1, "seed=0 .*=1")])
def test_a_position_in_other_data_is_refused(n_rows: int, seed: int, difference: str) -> None:
    state = shuffled(10, 2).state_dict()
    with pytest.raises(DataError, match=f"{difference}; .*trainer.resume_mode=none"):
        shuffled(n_rows, 2, seed).load_state_dict(state)


def test_the_same_number_of_other_rows_is_refused() -> None:
    other = ShuffledPrompts(Numbers(10, fingerprint="letters"), 2, 0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"fingerprint=numbers .* fingerprint=letters"):
        other.load_state_dict(shuffled(10, 2).state_dict())


def test_a_fingerprint_tells_rows_apart(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    fingerprints = []
    for name, content in (("a", "1"), ("b", "1"), ("c", "2")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"prompt": [{"role": "user", "content": content}]}))
        fingerprints.append(PromptDataset(str(path), tiny_tokenizer, max_prompt_length=100).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_the_state_survives_a_checkpoint_file(tmp_path: Path) -> None:
    prompts = shuffled(7, 3)
    uids(prompts, 3)
    torch.save(prompts.state_dict(), tmp_path / "data.pt")
    assert torch.load(tmp_path / "data.pt", weights_only=True) == prompts.state_dict()


def test_less_than_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"has 3 usable prompts, fewer than trainer\.train_batch_size=4"):
        shuffled(3, 4)
