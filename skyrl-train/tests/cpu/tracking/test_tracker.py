import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from skyrl_report.metrics_file import read_metrics
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.tracking import Tracking


def test_uncommitted_metrics_are_written_with_the_next_ones(tmp_path: Path) -> None:
    with Tracking("catch", "shaped", [], {}, tmp_path) as tracking:
        tracking.log({"mine": 1.0}, step=1, commit=False)
        tracking.log({"reward": 0.5}, step=1)
        tracking.log({"reward": 0.6}, 2)
    rows = [{"step": 1, "mine": 1.0, "reward": 0.5}, {"step": 2, "reward": 0.6}]
    assert read_metrics(tmp_path / "metrics.jsonl") == rows


def test_the_console_prints_one_line_per_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracking("catch", "shaped", "console", {"seed": 1}, tmp_path) as tracking:
        tracking.log({"policy/policy_kl": 0.25, "eval/all/avg_score": 0.5, "policy/grad_norm": 1.0}, step=3)
    assert capsys.readouterr().out.splitlines() == [
        "step 3",
        "  eval/all     avg_score 0.5",
        "  policy       grad_norm 1 · policy_kl 0.25",
    ]


def test_an_unknown_backend_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'wanbd'.*jsonl, console, tensorboard, wandb"):
        Tracking("catch", "shaped", ["console", "wanbd"], {}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_does_not_hide_why_a_run_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        with Tracking("catch", "shaped", [], {}, tmp_path) as tracking:
            (descriptor,) = {
                int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.resolve() == metrics.resolve()
            }
            with open("/dev/full", "wb") as full:
                os.dup2(full.fileno(), descriptor)
            tracking.log({"reward/avg_raw_reward": 0.5}, step=1)
            raise CheckpointError("the reason")

    metrics = tmp_path / "metrics.jsonl"
    with pytest.raises(CheckpointError, match="the reason"):
        run()
    assert "The last metrics could not be written: [Errno 28] No space left on device" in caplog.text


def test_started_backends_are_closed_if_a_later_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        Tracking("catch", "shaped", ["wandb"], {}, tmp_path)
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert str(tmp_path / "metrics.jsonl") not in opened


def _scalars(folder: Path, name: str) -> dict[int, float]:
    events = EventAccumulator(str(folder)).Reload()
    return {event.step: event.value for event in events.Scalars(name)}


@pytest.mark.parametrize("variable", [None, "elsewhere"])
def test_tensorboard_hides_steps_that_a_resumed_run_repeats(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    if variable is not None:
        monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / variable))
    with Tracking("catch", "shaped", "tensorboard", {}, tmp_path) as tracking:
        for step, reward in ((1, 1.0), (2, float("nan")), (3, 3.0)):
            tracking.log({"reward": reward}, step)
        tracking.truncate_after(1)
        tracking.log({"reward": 20}, 2)
    assert _scalars(tmp_path / (variable or "tensorboard"), "reward") == {1: 1.0, 2: 20.0}
    assert [row["reward"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 20]
    assert (tmp_path / "tensorboard").exists() == (variable is None)
