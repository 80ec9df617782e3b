import importlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples import prepare as module
from examples.gsm8k import gsm8k_dataset
from examples.multiply import multiply_dataset
from examples.prepare import HubSplit, Preparation, load_hub_rows, make_splits, prompt_field
from skyrl_gym.data.files import Row
from skyrl_train.dataset.files import read_rows
from skyrl_train.errors import DataError

Refuse = Callable[..., str]


def raw_row(n: int) -> Row:
    return {"question": f"What is {n} + 1?", "answer": f"{n}+1=<<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}


def write(path: Path, rows: list[Row]) -> str:
    """Write raw rows in the format of the file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        texts = [json.dumps(row) for row in rows]
        path.write_text("\n".join(texts) if path.suffix == ".jsonl" else f"[{', '.join(texts)}]")
    return str(path)


def read_answers(folder: Path) -> dict[str, list[int]]:
    """Return the answers in both files of a GSM8K dataset."""
    return {
        split: [int(row["reward_spec"]["ground_truth"]) for row in read_rows(str(folder / f"{split}.parquet"))]
        for split in ("train", "validation")
    }


def gsm8k(folder: Path, *flags: str) -> dict[str, list[int]]:
    gsm8k_dataset.main(["--output_dir", str(folder), *flags])
    return read_answers(folder)


@pytest.mark.parametrize(
    ("script", "source_name"),
    [
        ("aime.aime_dataset", "BytedTsinghua-SIA/DAPO-Math-17k:train"),
        ("gsm8k.gsm8k_dataset", "openai/gsm8k/main:train"),
        ("livecodebench.lcb_dataset", "agentica-org/DeepCoder-Preview-Dataset/lcbv5:train"),
        ("search.searchr1_dataset", "PeterJinGo/nq_hotpotqa_train:train"),
        ("text_to_sql.text_to_sql_dataset", "xlangai/spider:train"),
    ],
)
def test_the_hub_is_the_default_source_and_alternatives_are_named_offline(
    script: str, source_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refuse(importlib.import_module(f"examples.{script}").main)
    assert f"cannot load {source_name} from the Hugging Face Hub (ConnectionError: " in error
    assert "give its files with --source PATH, or try --source sample" in error


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset folder with the file layout of the Hub, read by the Hub client, with two configurations like GSM8K."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "owner" / "sums"
    configs = ["---", "configs:"]
    for config, first in (("main", 0), ("other", 100)):
        configs += [f"- config_name: {config}", "  data_files:"]
        for split, n_rows in (("train", 3), ("test", 2)):
            configs += [f"  - split: {split}", f"    path: {config}/{split}-*"]
            write(repository / config / f"{split}-00000-of-00001.parquet", [raw_row(first + n) for n in range(n_rows)])
    (repository / "README.md").write_text("\n".join([*configs, "---", ""]))
    return str(repository)


def test_the_split_and_the_configuration_of_a_dataset_on_the_hub(hub: str) -> None:
    assert list(load_hub_rows(HubSplit(hub, "test", "other"))) == [raw_row(100), raw_row(101)]
    preparation = Preparation(
        gsm8k_dataset.SCHEMA,
        gsm8k_dataset.dataset_row,
        gsm8k_dataset.sample,
        (HubSplit(hub, "train", "main"), HubSplit(hub, "test", "main")),
    )
    splits = make_splits(preparation, "hub", seed=0)
    assert {split: [row["extra_info"]["index"] for row in rows] for split, rows in splits.items()} == {
        "train": [0, 1, 2],
        "validation": [0, 1],
    }
    assert splits["validation"][1]["extra_info"]["question"] == "What is 1 + 1?"


@pytest.mark.parametrize(("config", "split"), [(None, "train"), ("main", "validation"), ("maine", "train")])
def test_a_missing_configuration_or_split_on_the_hub_is_refused(hub: str, config: str | None, split: str) -> None:
    source_name = HubSplit(hub, split, config)
    with pytest.raises(DataError, match=re.escape(f"cannot load {source_name} from")):
        load_hub_rows(source_name)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize("validation", ["validation", "val", "dev", "test"])
def test_a_folder_with_both_files(tmp_path: Path, suffix: str, validation: str) -> None:
    write(tmp_path / "raw" / f"train{suffix}", [raw_row(n) for n in range(4)])
    write(tmp_path / "raw" / f"{validation}{suffix}", [raw_row(n) for n in range(4, 6)])
    answers = gsm8k(tmp_path / "data", "--source", str(tmp_path / "raw"))
    assert answers == {"train": [1, 2, 3, 4], "validation": [5, 6]}


def test_a_folder_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    """Parts of a split are joined; other files and second formats are ignored."""
    for part in range(2):
        write(tmp_path / "raw" / f"train-0000{part}-of-00002.parquet", [raw_row(10 * part)])
    write(tmp_path / "raw" / "train.jsonl", [raw_row(99)])
    write(tmp_path / "raw" / "train_others.jsonl", [raw_row(98)])
    write(tmp_path / "raw" / "test-00000-of-00001.parquet", [raw_row(5)])
    assert gsm8k(tmp_path / "data", "--source", str(tmp_path / "raw")) == {"train": [1, 11], "validation": [6]}


def test_a_single_file_is_split_for_validation(tmp_path: Path) -> None:
    """Rows with equal prompts stay in the same split."""
    file = write(tmp_path / "raw.jsonl", [raw_row(n % 50) for n in range(100)])
    answers = gsm8k(tmp_path / "data", "--source", file)
    train, validation = (answers[split] for split in ("train", "validation"))
    assert (len(train), len(validation)) == (80, 20)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(n % 50 + 1 for n in range(100))
    assert gsm8k(tmp_path / "again", "--source", file) == answers
    assert gsm8k(tmp_path / "other", "--source", file, "--seed", "7") != answers
    large = gsm8k(tmp_path / "large", "--source", write(tmp_path / "large.jsonl", [raw_row(n) for n in range(3000)]))
    assert (len(large["train"]), len(large["validation"])) == (2500, 500), "at most 500 tasks are held out"


def test_max_rows_draws_from_each_file_and_keeps_the_order(tmp_path: Path) -> None:
    write(tmp_path / "raw" / "train.jsonl", [raw_row(n) for n in range(100)])
    write(tmp_path / "raw" / "test.jsonl", [raw_row(n) for n in range(3)])
    flags = ["--source", str(tmp_path / "raw"), "--max_rows", "10"]
    answers = gsm8k(tmp_path / "data", *flags)
    assert answers["validation"] == [1, 2, 3]
    assert len(answers["train"]) == 10
    assert answers["train"] == sorted(answers["train"]) != list(range(1, 11))
    assert gsm8k(tmp_path / "other", *flags, "--seed", "7")["train"] != answers["train"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source", "nowhere"], "--source=nowhere is neither a file nor a folder; use hub, sample, or a path"),
        (["--source", "{raw}/rows.csv"], "rows.csv must end in one of .parquet, .jsonl, .json"),
        (["--source", "{raw}/empty"], "empty has no train.parquet, train.jsonl or train.json"),
        (["--source", "{raw}/none.jsonl"], "none.jsonl has no rows for train.parquet"),
        (["--source", "{raw}/single.jsonl"], "single.jsonl has a single task, which cannot be in both files"),
        (["--source", "{raw}/bad.jsonl"], "bad.jsonl: line 1 is not JSON"),
        (["--source", "{raw}/lacking.jsonl"], "row 1 of the train split of .*: it has no 'answer'; its columns are q"),
        (["--source", "{raw}/typed.jsonl"], "row 0 of .*: question='3' is of the type int, not str"),
        (["--source", "sample", "--max_rows", "0"], "--max_rows=0 leaves no rows; use 1 or more"),
        (["--source", "sample", "--max_rows", "x"], "argument --max_rows: invalid int value: 'x'"),
    ],
)
def test_mistakes_are_reported_and_no_files_are_written(
    flags: list[str], message: str, tmp_path: Path, refuse: Refuse
) -> None:
    raw = tmp_path / "raw"
    (raw / "empty").mkdir(parents=True)
    (raw / "rows.csv").write_text("question,answer\n")
    (raw / "bad.jsonl").write_text("{")
    write(raw / "none.jsonl", [])
    write(raw / "single.jsonl", [raw_row(1)])
    write(raw / "lacking.jsonl", [raw_row(1), {"question": "What?"}])
    write(raw / "typed.jsonl", [raw_row(1) | {"question": 3}])
    assert re.search(message, refuse(gsm8k_dataset.main, *(flag.format(raw=raw) for flag in flags)))


def test_a_dataset_that_is_not_on_the_hub_is_reported(refuse: Refuse) -> None:
    message = refuse(multiply_dataset.main, "--source", "hub")
    assert "--source=hub: this dataset is not on the Hub; use --source sample" in message


def test_both_files_are_replaced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up during the second file leaves the old files and no partial ones."""
    before = gsm8k(tmp_path, "--source", "sample", "--max_rows", "3")
    write_table: Callable[..., None] = module.pq.write_table

    def write_to_full_disk(table: Any, path: Path) -> None:
        write_table(table, path)
        if "validation" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.pq, "write_table", write_to_full_disk)
    with pytest.raises(SystemExit):
        gsm8k(tmp_path, "--source", "sample", "--max_rows", "3", "--seed", "7")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.parquet", "validation.parquet"]
    assert read_answers(tmp_path) == before


def test_a_folder_with_the_name_of_an_output_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.parquet").mkdir()
    with pytest.raises(SystemExit):
        gsm8k(tmp_path, "--source", "sample")
    assert "train.parquet" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]


def test_a_prompt_is_a_list_of_messages_with_a_role_and_a_content() -> None:
    prompt = [{"content": "What?", "role": "user", "tool_calls": None}]
    assert prompt_field({"prompt": prompt}) == [{"role": "user", "content": "What?"}]
    for wrong in ("What?", [], ["What?"], [{"role": "user"}], [{"role": "user", "content": 3}]):
        with pytest.raises(DataError):
            prompt_field({"prompt": wrong})


def test_held_out_tasks_do_not_depend_on_hash_order() -> None:
    """String hashes differ between processes, and the sample must not."""
    preparation = Preparation(gsm8k_dataset.SCHEMA, gsm8k_dataset.dataset_row, gsm8k_dataset.sample)
    rows = [gsm8k_dataset.dataset_row(raw_row(n), "train", n) for n in range(20)]
    chosen = module.hold_out(preparation, rows, "x", seed=3)["validation"]
    expected = set(random.Random(3).sample(range(20), 4))
    assert [row["extra_info"]["index"] for row in chosen] == sorted(expected)
