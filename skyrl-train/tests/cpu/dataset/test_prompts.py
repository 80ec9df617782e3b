import json
import logging
from pathlib import Path
from typing import Any

import pytest
from train_kit import golden
from train_kit.datasets import prompt_row, write_rows
from train_kit.messages import user
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import load_config
from skyrl_train.dataset.files import JoinedRows
from skyrl_train.dataset.mixture import MixedPrompts
from skyrl_train.dataset.order import PromptOrder, ShuffledPrompts
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.entrypoints.evaluation import EvaluationExperiment
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.errors import DataError, InvalidRow, SkippedRow
from skyrl_train.generators.chat_template import TEMPLATES, ChatEncoder
from skyrl_train.types import PromptRow

LONG = 10_000


def test_columns_become_extras_and_sources_are_joined_in_order(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    first = write_rows(
        tmp_path, [prompt_row("a", env_class="catch", data_source="games/catch", reward_spec={"mode": "shaped"})]
    )
    second = write_rows(
        tmp_path, [prompt_row("b", extra_info={"index": 7}), prompt_row("c", data_source=None)], "more.jsonl"
    )
    rows = list(PromptDataset([first, second], tiny_tokenizer, LONG))
    assert [row.prompt for row in rows] == [[user(content)] for content in "abc"]
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
    rows = [prompt_row("1" * n) for n in (3, 5, 4)]
    n_tokens = len(
        tiny_tokenizer.apply_chat_template(
            rows[2]["prompt"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
    )
    source = write_rows(tmp_path, rows)
    with caplog.at_level(logging.INFO):
        kept = PromptDataset(source, tiny_tokenizer, n_tokens)
    assert [(row.uid, row.prompt[0]["content"]) for row in kept] == [("0", "111"), ("1", "1111")]
    assert f"kept 2 of 3 prompts (≤ {n_tokens} tokens)" in caplog.text
    assert kept.longest_prompt == n_tokens
    assert PromptDataset(source, tiny_tokenizer, LONG).longest_prompt == n_tokens + 1
    assert len(PromptDataset(source, tiny_tokenizer, n_tokens - 1)) == 1
    assert len(PromptDataset(source, tiny_tokenizer, n_tokens + 1)) == 3
    with pytest.raises(DataError, match=rf"all 3 prompts .*max_prompt_length=2 .*shortest has {n_tokens - 1}\)"):
        PromptDataset(source, tiny_tokenizer, 2)


def test_column_names_are_configurable(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    source = write_rows(tmp_path, [{"question": [user("a")], "env": "catch", "prompt": "kept", "image": "python:3.12"}])
    (row,) = PromptDataset(source, tiny_tokenizer, LONG, 8, "question", "env")
    assert (row.env_class, row.env_extras) == ("catch", {"prompt": "kept", "image": "python:3.12"})


def test_a_row_without_a_chat_prompt_is_named(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, pytestconfig: pytest.Config
) -> None:
    def find_error(row: dict[str, Any]) -> str:
        source = write_rows(tmp_path, [prompt_row("fine"), row])
        error = golden.catch(DataError, lambda: PromptDataset(source, tiny_tokenizer, LONG), tmp_path)
        return error.replace(tiny_tokenizer.name_or_path, "a-text-model")

    rows = {row: [find_error(json.loads(row))] for row in golden.read("dataset/prompts")}
    golden.compare("dataset/prompts", rows, pytestconfig)


@pytest.mark.catch_tokenizer
def test_prompts_are_measured_with_the_template_of_the_generator(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tiny_model_path: Path
) -> None:
    source = write_rows(tmp_path, [prompt_row("a"), prompt_row("ä")])
    name, variables = "qwen3_with_thinking", {"enable_thinking": False}
    encoder = ChatEncoder(tiny_tokenizer, (TEMPLATES / f"{name}.jinja").read_text(), variables)
    n_tokens = len(encoder.prompt_ids([user("a")]))
    assert n_tokens > len(ChatEncoder(tiny_tokenizer).prompt_ids(prompt_row("ä")["prompt"]))
    cfg = load_config(
        {
            "trainer": {"policy": {"model": {"path": str(tiny_model_path)}}, "max_prompt_length": n_tokens},
            "data": {"train_data": [source], "val_data": [source]},
            "generator": {"chat_template": {"name_or_path": name}, "chat_template_kwargs": variables},
        }
    )
    exp = RLExperiment(cfg)
    for dataset in (exp.get_train_dataset(), exp.get_eval_dataset(), EvaluationExperiment(cfg).get_eval_dataset()):
        assert dataset is not None
        assert [row.prompt for row in dataset] == [[user("a")]]


def test_a_file_without_rows_is_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    source = write_rows(tmp_path, [])
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


def draw(prompts: PromptOrder[PromptRow], n_batches: int) -> list[list[str]]:
    return [[drawn.row.prompt[0]["content"] for drawn in prompts.next_batch()] for _ in range(n_batches)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_that_are_checked_when_they_are_drawn_come_in_the_same_order(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, suffix: str
) -> None:
    rows = [prompt_row(str(i), env_class="catch", data_source=f"s{i % 2}", extra_info={"index": i}) for i in range(50)]
    source = write_rows(tmp_path, rows, f"rows{suffix}")
    checked = PromptDataset(source, tiny_tokenizer, LONG)
    drawn = PromptDataset(source, tiny_tokenizer, LONG, max_checked_rows=5)
    assert (checked.is_checked, drawn.is_checked) == (True, False)
    assert list(checked) == list(drawn)
    assert list(checked.data_sources()) == list(drawn.data_sources()) == [f"s{i % 2}" for i in range(50)]
    assert len(list(checked.checked_rows())) == 50
    sample = list(drawn.checked_rows())
    assert len(sample) == 5
    assert [location for location, _ in sample] == [f"row {row.prompt[0]['content']} of {source}" for _, row in sample]
    for order in (lambda data: ShuffledPrompts(data, 8, 3), lambda data: MixedPrompts(data, 8, 3, {"s0": 1, "s1": 3})):
        assert draw(order(checked), 20) == draw(order(drawn), 20)


def test_rows_that_cannot_be_used_are_skipped_when_they_are_drawn(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [prompt_row(str(i)) for i in range(60)]
    sample = set(JoinedRows([write_rows(tmp_path, rows)]).sample(20))
    bad, long, broken = [i for i in range(60) if i not in sample][:3]
    rows[bad]["prompt"] = "a text"
    rows[long] = prompt_row("1" * 200)
    source = Path(write_rows(tmp_path, rows))
    lines = source.read_text().splitlines()
    lines[broken] = "{"
    source.write_text("\n".join(lines))
    dataset = PromptDataset(str(source), tiny_tokenizer, 100, max_checked_rows=20)
    for index, kind, reason in (
        (bad, InvalidRow, "not a list of messages"),
        (long, SkippedRow, "more than 100"),
        (broken, InvalidRow, f"line {broken + 1} is not JSON"),
    ):
        with pytest.raises(kind, match=reason):
            dataset[index]
    prompts = ShuffledPrompts(dataset, 8, seed=0)
    epoch = [text for batch in draw(prompts, 7) for text in batch]
    assert len(set(epoch)) == 56
    assert not {rows[i]["prompt"][0]["content"] for i in (long,)} & set(epoch)
    state = prompts.state_dict()
    following = draw(prompts, 20)
    resumed = ShuffledPrompts(PromptDataset(str(source), tiny_tokenizer, 100, max_checked_rows=20), 8, seed=0)
    resumed.load_state_dict(state)
    assert draw(resumed, 20) == following
    assert resumed.metrics == prompts.metrics
    assert prompts.metrics["data/n_skipped"] >= 6
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum(f"Skipped: row {bad} of {source}" in warning for warning in warnings) == 2  # one for each order
    assert not any(f"row {long} " in warning for warning in warnings)


def test_data_without_a_usable_row_ends_the_run(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    sample = set(JoinedRows([write_rows(tmp_path, [{}] * 60)]).sample(20))
    rows = [
        prompt_row("1" if i in sample else "1" * 200, data_source="short" if i in sample else "long") for i in range(60)
    ]
    dataset = PromptDataset(write_rows(tmp_path, rows), tiny_tokenizer, 100, max_checked_rows=20)
    with pytest.raises(DataError, match=r"fewer than 30 rows of data\.train_data can be used: all .* too long"):
        draw(ShuffledPrompts(dataset, 30, 0), 1)
    with pytest.raises(DataError, match=r"no row of the data source long can be used: all .* too long"):
        draw(MixedPrompts(dataset, 8, 0, {"short": 1, "long": 1}), 1)
