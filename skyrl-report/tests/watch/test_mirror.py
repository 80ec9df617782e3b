import shutil
from pathlib import Path

import pytest
from report_kit.example import write_example
from report_kit.runs import write_metrics

from skyrl_report.errors import DataError
from skyrl_report.watch.mirror import open_run
from skyrl_report.watch.server import Site


def test_a_remote_run_is_copied_and_kept_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = write_example(tmp_path / "bucket/catch/shaped")
    (remote.path / "ckpts").mkdir()
    (remote.path / "ckpts/weights").write_text("large")
    monkeypatch.setattr("skyrl_report.watch.server.MIRROR_S", 0.0)
    with open_run(f"file://{remote.path}") as (local, mirror):
        assert local.path.parts[-2:] == ("catch", "shaped")
        assert local.eval_steps() == remote.eval_steps()
        assert not (local.path / "ckpts").exists()
        site = Site(local, mirror)
        changed_at = local.train_log.stat().st_ctime_ns
        write_metrics(remote.metrics, [{"reward/avg_raw_reward": 0.5}] * 12)
        page = site.find("/report.html")
        assert page is not None
        assert b"11 training steps" in page.content
        assert local.train_log.stat().st_ctime_ns == changed_at, "an unchanged file is not copied again"
    assert not local.path.exists()


def test_the_folder_of_uploaded_evaluations_is_enough(tmp_path: Path) -> None:
    run = write_example(tmp_path / "run")
    shutil.copytree(run.path / "evals", tmp_path / "evals/shaped")
    with open_run(f"file://{tmp_path}/evals/shaped") as (local, _):
        assert local.eval_steps() == [0, 8]


def test_unreadable_sources(tmp_path: Path) -> None:
    for source, message in [
        (str(tmp_path / "nothing"), "is not a folder"),
        (f"file://{tmp_path}/nothing", "has no files"),
        ("nosuch://bucket/run", "cannot read nosuch://bucket/run"),
    ]:
        with pytest.raises(DataError, match=message), open_run(source):
            pass
