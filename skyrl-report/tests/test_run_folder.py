from pathlib import Path

from skyrl_report.run_folder import RunFolder


def test_eval_steps_are_sorted_numerically(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.eval_steps() == []
    for step in (10, 9, 0):
        folder.evals(step).mkdir(parents=True)
    (tmp_path / "evals" / "notes").mkdir()
    assert folder.eval_steps() == [0, 9, 10]
