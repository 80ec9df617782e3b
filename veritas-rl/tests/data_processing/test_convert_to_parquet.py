from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_processing import convert_to_parquet
from data_processing.jobs import read_records
from skyrl_gym.tasks import compute_score


def convert(tasks: Path, folder: Path, *flags: str) -> int:
    return convert_to_parquet.main(["--input", str(tasks), "--out-dir", str(folder), *flags])


def test_parquet_for_sft_and_rl(generated: Path, tmp_path: Path) -> None:
    folder, flags = tmp_path / "parquet", ["--val-ratio", "0.25", "--shuffle"]
    assert convert(generated, folder, *flags, "--format", "sft") == 0
    train, val = (pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    assert (len(train), len(val)) == (6, 2)
    assert train[0].keys() >= {"prompt", "response"}
    records = {record["prompt"]: record for record in read_records(generated)}
    assert all(row["response"] == records[row["prompt"]]["answer"] for row in train + val)
    assert convert(generated, folder, *flags, "--format", "rl") == 0
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == [row["prompt"] for row in train]
    assert not {"response"} & rows[0].keys()
    for row in rows:
        record = records[row["prompt"][0]["content"]]
        truth = row["reward_model"]["ground_truth"]
        assert compute_score(row["data_source"], record["answer"], truth, row["extra_info"]) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--response-field", "reply", "--format", "sft"], "has no text in reply"),
        (["--prompt-field", "question"], "--prompt-field"),
        (["--val-ratio", "1"], "leave no training row"),
    ],
)
def test_mistakes_are_named(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert convert(generated, tmp_path, *flags) == 1
    assert words in capsys.readouterr().err
