import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_kit.fleet.tasks import COUNTS, fleet_entries, write_tasks

from integrations.fleet.prepare_dataset import SplitRules, assign_splits, command_line, hash_fraction, main, prepare
from integrations.fleet.tasks import FleetTask, load_tasks
from skyrl_train.dataset.files import read_rows
from skyrl_train.errors import DataError


def run(tasks_json: Path, output: Path, *flags: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """Prepare a dataset; return the report and the rows of each file."""
    report = prepare(command_line().parse_args(["--tasks-json", str(tasks_json), "--output-dir", str(output), *flags]))
    files = {split: output / f"{split}.parquet" for split in ("train", "validation")}
    return report, {split: read_rows(str(file)) if file.exists() else [] for split, file in files.items()}


def keys(rows: dict[str, list[dict[str, Any]]]) -> dict[str, set[str]]:
    return {split: {row["task_key"] for row in chosen} for split, chosen in rows.items()}


@pytest.fixture
def all_tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks.json", fleet_entries())


def make_tasks(env_key: str, n_tasks: int, modality: str = "tool_use", first: int = 0) -> list[FleetTask]:
    return [FleetTask(f"{env_key}_{i}", env_key, modality, "p", None, {}) for i in range(first, first + n_tasks)]


@pytest.mark.parametrize(
    ("key", "expected"),
    [("github_task_0", 0.255919), ("github_task_1", 0.940663), ("booking_task_7", 0.759116), ("zillow_123", 0.524040)],
)
def test_the_hash_is_the_start_of_md5(key: str, expected: float) -> None:
    assert hash_fraction(key) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("ratio", "n_eval"), [(0.02, 8), (0.1, 48), (0.2, 105)])
def test_known_numbers_of_evaluation_tasks(ratio: float, n_eval: int) -> None:
    tasks = [FleetTask(f"github_task_{i}", "github", "tool_use", "p", None, {}) for i in range(500)]
    assert Counter(assign_splits(tasks, SplitRules(eval_ratio=ratio)).values())["validation"] == n_eval


def test_the_split_of_all_tasks(all_tasks: Path, tmp_path: Path) -> None:
    report, rows = run(all_tasks, tmp_path / "data")
    assert sum(map(len, rows.values())) == sum(map(sum, COUNTS.values())) == 4881
    evaluated = Counter((row["data_source"], row["modality"]) for row in rows["validation"])
    assert evaluated["outlook", "tool_use"] == 24
    assert evaluated["instacart", "computer_use"] == 32
    assert set(evaluated) == {
        ("outlook", "tool_use"),
        ("instacart", "computer_use"),
        ("github", "tool_use"),
        ("booking", "tool_use"),
        ("google-maps", "computer_use"),
    }
    for stratum, n_tasks in {("github", "tool_use"): 1865, ("booking", "tool_use"): 1089}.items():
        assert abs(evaluated[stratum] - 0.02 * n_tasks) < 4 * (0.02 * n_tasks) ** 0.5
    assert "4.9 expected, fewer than 5" in report  # reddit
    assert "held out" in report
    assert {row["env_class"] for row in rows["train"]} == {"fleet_task"}


def test_every_run_and_every_filter_makes_the_same_split(all_tasks: Path, tmp_path: Path) -> None:
    whole = keys(run(all_tasks, tmp_path / "all")[1])
    shuffled = fleet_entries()
    random.Random(3).shuffle(shuffled)
    assert keys(run(write_tasks(tmp_path / "shuffled.json", shuffled), tmp_path / "again")[1]) == whole
    for flags in (["--modality", "tool_use"], ["--env-filter", "github,outlook"], ["--difficulty-filter", "1,3"]):
        part = keys(run(all_tasks, tmp_path / "part", *flags)[1])
        assert part["train"] <= whole["train"]
        assert part["validation"] <= whole["validation"]
        assert part["train"]


@settings(deadline=None)
@given(st.integers(250, 600), st.integers(0, 600), st.integers(0, 600))
def test_more_tasks_move_no_old_task(n_old: int, n_same: int, n_other: int) -> None:
    old = make_tasks("github", n_old)
    more = [*make_tasks("jira", n_other), *make_tasks("github", n_same, first=n_old), *old]
    before, after = assign_splits(old, SplitRules()), assign_splits(more, SplitRules())
    assert before.items() <= after.items()


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 300))
def test_with_the_previous_split_no_old_task_moves_across_the_minimum(n_old: int, n_new: int) -> None:
    old = make_tasks("github", n_old)
    before = assign_splits(old, SplitRules())
    after = assign_splits([*old, *make_tasks("github", n_new, first=n_old)], SplitRules(), before)
    assert before.items() <= after.items()


def test_keep_split_reads_an_earlier_dataset(tmp_path: Path) -> None:
    small = write_tasks(tmp_path / "small.json", fleet_entries({"github": (240, 0)}))
    large = write_tasks(tmp_path / "large.json", fleet_entries({"github": (2000, 0)}))
    old = keys(run(small, tmp_path / "small")[1])
    assert len(old["train"]) == 240
    new = keys(run(large, tmp_path / "large", "--keep-split", str(tmp_path / "small"))[1])
    assert old["train"] <= new["train"]
    assert new["validation"]
    assert not old["train"] <= keys(run(large, tmp_path / "large")[1])["train"]  # without it, some move


def test_limits_leave_tasks_out_and_move_none(all_tasks: Path, tmp_path: Path) -> None:
    whole = keys(run(all_tasks, tmp_path / "all")[1])
    _, rows = run(
        all_tasks, tmp_path / "part", "--max-eval-per-env", "10", "--max-eval-prompts", "30", "--max-env-ratio", "0.2"
    )
    limited = keys(rows)
    assert limited["train"] <= whole["train"]
    assert limited["validation"] <= whole["validation"]
    assert len(limited["validation"]) == 30
    assert Counter(row["data_source"] for row in rows["validation"]) == dict.fromkeys(
        ("booking", "github", "google-maps", "instacart", "outlook"), 6
    )
    shares = Counter(row["data_source"] for row in rows["train"])
    assert max(shares.values()) <= 0.2 * shares.total()
    assert shares["github"] == shares["booking"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env-filter", "outlook", "--modality", "tool_use"], "nothing to train on"),
        (["--env-filter", "jira"], "no task passes"),
        (["--eval-ratio", "98"], "--eval-ratio=98.0 must be"),
        (["--held-out", "outlook"], "--held-out=outlook must be environment:tool_use"),
        (["--max-env-ratio", "0.2", "--env-filter", "github"], "use at least 1, or leave it out"),
        (["--max-tasks", "0"], "must be at least 1"),
        (["--keep-split", "nowhere"], "--keep-split=nowhere holds neither"),
    ],
)
def test_impossible_requests_are_refused(flags: list[str], message: str, all_tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        run(all_tasks, tmp_path / "data", *flags)
    assert not (tmp_path / "data").exists()


def test_a_stale_validation_file_is_removed(all_tasks: Path, tmp_path: Path) -> None:
    run(all_tasks, tmp_path / "data")
    report, rows = run(all_tasks, tmp_path / "data", "--env-filter", "reddit")
    assert not rows["validation"]
    assert "trainer.eval_interval=-1" in report


def test_entries_that_cannot_be_graded_are_left_out_and_named(tmp_path: Path) -> None:
    good = {"task_key": "a", "env_key": "github", "prompt": "Do it.", "verifier_func": "def verify(env): return 1"}
    entries: list[Any] = [good, good | {"prompt": "Other."}, {"task_key": "b"}, {**good, "key": "c", "task_key": None}]
    tasks, left_out = load_tasks(write_tasks(tmp_path / "tasks.json", [*entries, good | {"task_key": 3}, "x"]))
    assert [(task.key, task.prompt) for task in tasks] == [("a", "Do it."), ("c", "Do it.")]
    assert len(left_out) == 4
    assert "'a' occurs twice" in left_out[0]
    (graded, ungraded) = fleet_entries({"github": (2, 0)})
    for verifier in ({}, {"verifier_code": None}, {"verifier_code": "", "verifier_func": ""}):
        ungraded.pop("verifier_code", None)
        tasks, left_out = load_tasks(write_tasks(tmp_path / "tasks.json", [graded, ungraded | verifier]))
        assert [task.key for task in tasks] == ["github_tool_use_0"]
        assert left_out == [
            "entry 1: task 'github_tool_use_1' has no verifier_code, so that nothing can grade it; export it with its "
            "verifier"
        ]


def test_tasks_that_need_screenshots_are_counted_in_the_report(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.json", fleet_entries({"github": (2, 0), "amazon": (0, 3)}))
    assert "A text model refuses 3 tasks: they have a modality whose screenshots" in run(tasks, tmp_path / "all")[0]
    assert "A text model refuses" not in run(tasks, tmp_path / "tools", "--modality", "tool_use")[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"tasks": 3}', "[3]"])
def test_a_file_without_tasks_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text(text)
    with pytest.raises(DataError, match="task file"):
        load_tasks(tmp_path / "tasks.json")


def test_the_command_prints_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tasks-json", str(tmp_path / "missing.json")])
    assert "missing.json cannot be read" in capsys.readouterr().err
