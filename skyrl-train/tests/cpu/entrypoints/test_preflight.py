from pathlib import Path
from typing import Any

import pytest
from train_kit.datasets import prompt_row
from train_kit.processes import run_python
from train_kit.runs import expect_error, train

from skyrl_train.dataset.files import JoinedRows, read_rows, write_jsonl
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.entrypoints.preflight import check_data, find_folder_fault, find_missing
from skyrl_train.errors import DataError


def test_a_folder_that_exists_or_can_be_created_has_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$cash").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (str(tmp_path), "new/folder", "$cash/new", "$", "link/new", "ünï code", "n" * 255):
        assert find_folder_fault(folder) is None, folder
    assert {entry.name for entry in tmp_path.iterdir()} == {"$cash", "link"}, "a check creates nothing"


@pytest.mark.parametrize(
    ("folder", "fault"),
    [
        ("file", "{0}/file is not a folder"),
        ("file/below", "{0}/file is not a folder"),
        ("dangling/below", "{0}/dangling is a broken link"),
        ("$UNSET_VARIABLE", "the environment variable $UNSET_VARIABLE is not set"),
        ("a/${UNSET_VARIABLE}/b", "the environment variable ${{UNSET_VARIABLE}} is not set"),
        ("~no_such_user/x", "there is no user no_such_user"),
        ("n" * 256, "names of files have at most 255 bytes"),
        ("ü" * 128, "names of files have at most 255 bytes"),
        ("d/" * 2000, "paths have at most 4,096 bytes, and files in the folder add up to 300"),
        ("nul\0", "it contains a NUL character"),
        ("half\ud83d", "it contains a lone surrogate"),
    ],
)
def test_a_folder_that_cannot_be_written_has_a_fault(
    folder: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert find_folder_fault(folder) == fault.format(tmp_path)


def test_a_folder_of_another_user_is_read_only() -> None:
    script = (
        "import os; from skyrl_train.entrypoints.preflight import find_folder_fault\n"
        "os.getuid() or os.setuid(65534)\n"
        "print(find_folder_fault('/usr/runs'))"
    )
    assert run_python("-c", script) == "/usr is read-only for this user\n"


def test_a_name_on_the_hub_may_be_like_that_of_a_folder(
    catch_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen/Qwen3-4B").mkdir(parents=True)
    cfg = parse_cli([*catch_run, "trainer.policy.model.path=Qwen/Qwen3-8B"])
    assert list(find_missing(cfg, trains=True)) == []


def test_settings_that_no_row_uses_are_reported(
    catch_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [prompt_row("1", "gsm8k", reward_spec={"ground_truth": "1"})] * 4)
    files = [f"data.{name}_data=['{tmp_path}/rows.jsonl']" for name in ("train", "val")]
    check_data(parse_cli([*catch_run, *files, "environment.env_class=catch"]), trains=True)
    assert "environment.env_class=catch is ignored, because every row has an env_class (gsm8k)" in caplog.text
    check_data(parse_cli([*catch_run, *files, "environment.skyrl_gym.aime.grader=minerva"]), trains=True)
    assert "environment.skyrl_gym.aime is ignored, because no row has env_class=aime" in caplog.text


def test_a_subclass_with_a_generator_of_its_own_may_play_any_rows(catch_run: list[str], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [prompt_row("1", "unheard_of")])
    files = [f"data.{name}_data=['{tmp_path}/rows.jsonl']" for name in ("train", "val")]
    cfg = parse_cli([*catch_run, *files])
    with pytest.raises(DataError, match="env_class=unheard_of"):
        RLExperiment(cfg).check_data()

    class Own(RLExperiment):
        def get_generator(self, *arguments: Any) -> Any:
            raise NotImplementedError

    Own(cfg).check_data()


def test_rows_of_large_data_are_checked_when_they_are_drawn(
    catch_run: list[str],
    catch_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = read_rows(f"{catch_data}/train.parquet")
    source = tmp_path / "rows.jsonl"
    write_jsonl(source, rows)
    sample = JoinedRows([str(source)]).sample(4)
    bad, unknown, refused = [i for i in range(len(rows)) if i not in sample][:3]
    rows[bad]["prompt"], rows[unknown]["env_class"] = "a text", "kaboom"
    rows[refused] |= {"env_class": "gsm8k", "reward_spec": {"method": "rule"}}
    write_jsonl(source, rows)
    command = [*catch_run, f"data.train_data=['{source}']", "data.max_checked_rows=4"]
    train(*command, "--dry-run")
    assert f"{source} ({len(rows)} rows), a sample of 4 rows checked" in capsys.readouterr().out
    assert f"row {bad} of {source}: prompt='a text'" in expect_error(*command, "data.max_checked_rows=null")
    run = train(*command, "trainer.epochs=2", "trainer.eval_interval=-1")
    assert f"They are a sample of {len(rows)} rows (data.max_checked_rows=4)" in caplog.text
    assert f"Skipped: row {bad} of {source}: prompt='a text' is not a list of messages" in caplog.text
    assert f"Skipped: row {unknown} of {source}: env_class=kaboom" in caplog.text
    assert f"Skipped: row {refused} of {source}: the environment gsm8k rejects it" in caplog.text
    assert run.metrics[-1]["data/n_skipped"] >= 1
