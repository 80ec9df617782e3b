from pathlib import Path

import pytest
from train_kit.runs import Run, expect_error, read_lines, train


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
    """Folders of checkpoints and exports are not used."""
    (tmp_path / "file").touch()  # no folder can be created below it, even by root
    folders = [f"trainer.{name}={tmp_path}/file/{name}" for name in ("ckpt_path", "export_path")]
    run = train(*arguments, *folders, "trainer.hf_save_interval=1", command="generate")
    folder = run.folder / "evals/eval_only"
    (metrics,) = read_lines(folder / "aggregated_results.jsonl")
    rows = [row for path in folder.glob("*.jsonl") for row in read_lines(path) if "output_response" in row]
    assert len(rows) == 12 * 4
    assert metrics["eval/all/avg_score"] == pytest.approx(sum(sum(row["score"]) for row in rows) / 48)
    assert {"eval/all/pass_at_1", "eval/all/pass_at_2", "eval/all/pass_at_4"} <= set(metrics)
    assert f"{'eval/all/avg_score':<50} {metrics['eval/all/avg_score']:.6g}" in capsys.readouterr().out
    assert not (run.folder / "ckpts").exists()


def test_scores_equal_those_of_the_evaluation_before_training(arguments: list[str]) -> None:
    standalone = train(*arguments, "trainer.run_name=evaluated", command="generate").metrics[0]
    settings = ["trainer.run_name=trained", "trainer.eval_batch_size=3", "trainer.max_training_steps=1"]
    before = train(*arguments, *settings, "trainer.eval_interval=100").metrics[0]
    scores = {name for name in standalone if name.startswith(("eval/all", "eval/environment"))}
    assert len(scores) > 5
    assert {name: before[name] for name in scores} == pytest.approx({name: standalone[name] for name in scores})


def test_an_evaluation_describes_itself_and_leaves_other_runs_alone(arguments: list[str]) -> None:
    message = expect_error(*arguments, "data.val_data=[]", "trainer.eval_interval=-1", command="generate")
    assert "data.val_data=[] leaves nothing to evaluate" in message
    run = train(*arguments, command="generate")
    page = (run.folder / "report.html").read_text()
    assert "Evaluation, environment: catch" in page
    assert "the whole configuration" in page
    assert "From the evaluation, complete and unedited" in page
    train(*arguments, command="generate")  # the same evaluation may be repeated
    message = expect_error(*arguments, "generator.eval_n_samples_per_prompt=2", command="generate")
    assert "has an evaluation with other settings (generator.eval_n_samples_per_prompt: 4 -> 2)" in message
    assert "is a folder of `skyrl generate`" in expect_error(*arguments, "trainer.max_training_steps=1")
    trained = train(*arguments, "trainer.run_name=trained", "trainer.max_training_steps=1")
    metrics = (trained.folder / "metrics.jsonl").read_text()
    message = expect_error(*arguments, "trainer.run_name=trained", command="generate")
    assert "has a training run, whose metrics an evaluation would replace" in message
    assert (trained.folder / "metrics.jsonl").read_text() == metrics


def test_the_command_fails_if_every_rollout_fails_and_may_be_tried_again(arguments: list[str], tmp_path: Path) -> None:
    remote = f"trainer.remote_trajectory_url=file://{tmp_path}/remote"
    message = expect_error(*arguments, remote, "generator.trajectory_timeout_seconds=1e-9", command="generate")
    assert "error: all 48 rollouts failed; the first: " in message
    assert [file.name for file in (tmp_path / "remote").rglob("*.jsonl")] == ["synthetic_catch.jsonl"]
    run = Run(tmp_path / "skyrl/test_run")
    assert run.metrics[0]["eval/generate/n_invalid/trajectory_timeout"] == 48
    assert train(*arguments, command="generate").folder == run.folder  # with another timeout
    assert "eval/all/avg_score" in run.metrics[-1]
