"""The evaluation command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_train.entrypoints import main_base, main_generate


@pytest.fixture
def arguments(catch_run: list[str], catch_data: Path) -> list[str]:
    return [
        *catch_run,
        f"data.val_data=['{catch_data}/validation.parquet','{catch_data}/train.parquet']",
        "generator.eval_n_samples_per_prompt=4",
        "generator.eval_sampling_params.temperature=1",
    ]


def test_metrics_and_trajectories_are_written_and_printed(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main_generate.main(arguments)
    folder = tmp_path / "skyrl/test_run"
    (metrics,) = [json.loads(line) for line in (folder / "evals/eval_only/aggregated_results.jsonl").open()]
    rows = [json.loads(line) for path in folder.glob("evals/eval_only/*.jsonl") for line in path.open()]
    rows = [row for row in rows if "output_response" in row]
    assert len(rows) == 12 * 4
    assert metrics["eval/all/avg_score"] == pytest.approx(sum(sum(row["score"]) for row in rows) / 48)
    assert {"eval/all/pass_at_1", "eval/all/pass_at_2", "eval/all/pass_at_4"} <= set(metrics)
    printed = capsys.readouterr().out
    assert f"{'eval/all/avg_score':<50} {metrics['eval/all/avg_score']:.6g}" in printed
    assert not (folder / "ckpts").exists()


def test_scores_equal_those_of_the_evaluation_before_training(arguments: list[str], tmp_path: Path) -> None:
    main_generate.main(arguments)
    main_base.main([*arguments, "trainer.run_name=trained", "trainer.eval_batch_size=3"])
    standalone, before = (
        json.loads((tmp_path / "skyrl" / name / "metrics.jsonl").read_text().splitlines()[0])
        for name in ("test_run", "trained")
    )
    scores = {name for name in standalone if name.startswith(("eval/all", "eval/environment"))}
    assert len(scores) > 5
    assert {name: before[name] for name in scores} == pytest.approx({name: standalone[name] for name in scores})


def test_the_command_fails_if_every_rollout_fails(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main_generate.main([*arguments, "generator.trajectory_timeout_seconds=1e-9"])
    assert "error: all 48 rollouts failed; the first: " in capsys.readouterr().err
    (metrics,) = (tmp_path / "skyrl/test_run/evals/eval_only/aggregated_results.jsonl").open()
    assert json.loads(metrics)["eval/generate/n_invalid/trajectory_timeout"] == 48


def test_missing_prompts_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main_generate.main([*arguments, "data.val_data=[]", "trainer.eval_interval=-1"])
    assert exit_status.value.code == 1
    assert "data.val_data=[] leaves nothing to evaluate" in capsys.readouterr().err


def test_folders_of_checkpoints_and_exports_are_not_used(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()  # no folder can be created below it, even by root
    folders = [f"trainer.{name}={tmp_path}/file/{name}" for name in ("ckpt_path", "export_path")]
    main_generate.main([*arguments, *folders, "trainer.hf_save_interval=1"])
    assert "eval/all/avg_score" in capsys.readouterr().out


def test_help_shows_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    main_generate.main(["--help"])
    printed = capsys.readouterr().out
    assert "Evaluate a model without training it" in printed
    assert "generator.eval_sampling_params" in printed
