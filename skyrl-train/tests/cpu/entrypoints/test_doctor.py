import socket
from pathlib import Path

import pytest

from skyrl_train.entrypoints import doctor
from skyrl_train.entrypoints.cli import main


@pytest.fixture(autouse=True)
def without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log out of the Hub."""
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


def examine(*overrides: str) -> dict[str, doctor.CheckResult]:
    return {result.name: result for result in doctor.examine(overrides)}


def test_a_run_that_can_start_passes_every_check(catch_run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *catch_run, "environment.env_class=catch"]) == 0
    out = capsys.readouterr().out
    for name in ("versions", "configuration", "files", "data", "disk", "memory", "keys"):
        assert f"ok       {name}" in out
    assert "failed" not in out


def test_every_failed_check_is_printed_with_its_fix(catch_run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    missing = ["data.train_data=nowhere.parquet", "trainer.remote_ckpt_url=nosuch://bucket"]
    assert main(["doctor", *catch_run, "environment.env_class=catch", *missing]) == 1
    captured = capsys.readouterr()
    fault = "data.train_data=nowhere.parquet: the file nowhere.parquet does not exist"
    assert f"failed   files         {fault}" in captured.out
    assert "use a .parquet, .json or .jsonl file" in captured.out
    assert "failed   storage       trainer.remote_ckpt_url=nosuch://bucket cannot be written: " in captured.out
    assert "error: 2 of " in captured.err
    assert "checks failed: files, storage" in captured.err
    assert main(["doctor", "trainer.epochs=0"]) == 1
    assert "failed   configuration" in capsys.readouterr().out


def test_a_disk_that_is_too_small_for_a_checkpoint_fails_and_for_all_warns(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*catch_run, "environment.env_class=catch", "trainer.epochs=50", "trainer.ckpt_interval=1"]
    one = "trainer.max_ckpts_to_keep=1"
    for free, status, settings in (
        (1_000_000, "failed", []),
        (10_000_000, "warning", []),
        (10**12, "ok", []),
        (10_000_000, "ok", [one]),
        (10_000_000, "warning", [one, "trainer.hf_save_interval=1"]),
    ):
        monkeypatch.setattr(doctor, "free_bytes", lambda folder, free=free: free)
        disk = examine(*overrides, *settings)["disk"]
        assert disk.status == status, disk
        assert f"per checkpoint, every 1 step, {'the last one kept' if settings else 'all kept'}" in disk.text


def test_storage_is_written_and_left_empty(catch_run: list[str], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    assert examine(*catch_run, f"trainer.remote_ckpt_url={url}")["storage"].status == "ok"
    assert list((tmp_path / "remote").iterdir()) == []


def test_a_port_in_use_is_a_warning(catch_run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(doctor, "RAY_PORT", taken.getsockname()[1])
        ports = examine(*catch_run, "trainer.placement.launcher=ray")["ports"]
    assert (ports.status, "ray stop" in ports.fix) == ("warning", True)


def test_a_wrong_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["torch>=99", "no-such-package", "ray; extra == 'ray'"]
    )
    result = doctor._check_versions()
    assert result.status == "failed"
    assert "is not >=99; no-such-package is missing" in result.text
    assert "ray" not in result.text
