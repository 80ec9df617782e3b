import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from train_kit.runs import expect_error, train

from skyrl_train.algorithms import register_advantage_estimator
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.errors import ConfigError, EnvError


def test_a_run_writes_its_folder(catch_run: list[str]) -> None:
    run = train(*catch_run, "trainer.dump_trajectories=true", "trainer.hf_save_interval=1")
    files = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    assert files >= {
        "config.yaml",
        "metrics.jsonl",
        "train.log",
        "learning_curve.png",
        "report.html",
        "trajectories.html",
        "report_files/index.js",
        "session.json",
        "evals/global_step_0/synthetic_catch.jsonl",
        "evals/global_step_2/aggregated_results.jsonl",
        "trajectories/global_step_1.jsonl",
        "ckpts/latest_ckpt_global_step.txt",
        "ckpts/global_step_2/driver.pt",
        "ckpts/global_step_2/policy/.metadata",
        "export/global_step_2/policy/model.safetensors",
        "export/global_step_2/policy/tokenizer.json",
    }
    session = json.loads((run.folder / "session.json").read_text())
    assert (session["total_steps"], session["first_step"], session["error"]) == (2, 0, None)
    assert session["started_at"] < session["ended_at"]
    rows = run.trajectories(1)
    assert len(rows) == len(run.trajectories(2))
    for row in rows:
        assert "".join(row["tokens"]) == row["output_response"]
        assert {len(row[key]) for key in ("loss_mask", "logprobs", "advantages")} == {len(row["tokens"])}
        assert all(mask or not advantage for mask, advantage in zip(row["loss_mask"], row["advantages"], strict=True))
    assert any(value for row in rows for value in row["advantages"])
    assert run.steps == [0, 1, 2]
    first, last = run.metrics[1:]
    assert first["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert last["environment/avg_steps"] == 5  # the full number of turns
    assert "eval/environment/catch_rate" in last


def test_by_default_a_run_writes_the_trajectories_of_one_prompt_per_step(catch_run: list[str]) -> None:
    run = train(*catch_run, "trainer.max_training_steps=1")
    rows = run.trajectories(1)
    assert len({row["uid"].partition("_")[0] for row in rows}) == 1
    assert not any("tokens" in row for row in rows)
    stop = "trainer.run_name=none", "trainer.max_training_steps=1"
    assert not (train(*catch_run, *stop, "trainer.n_dumped_prompts=0").folder / "trajectories").exists()


def test_a_checkpoint_that_does_not_exist_is_named_before_the_run_starts(catch_run: list[str], tmp_path: Path) -> None:
    """`test_mistakes` has the mistakes that are found before PyTorch is imported."""
    path = "trainer.resume_path=nowhere/global_step_7"
    assert f"{path} does not exist" in expect_error(*catch_run, "trainer.resume_mode=from_path", path)
    assert not any(path.read_text() for path in tmp_path.rglob("metrics.jsonl"))


class _Exits(RLExperiment):
    """An experiment in which a task of user code exits with status 0."""

    async def _run(self) -> None:
        self.exiting = asyncio.create_task(self._exit())
        await asyncio.sleep(60)

    async def _exit(self) -> None:
        sys.exit(0)


def test_code_that_exits_does_not_look_like_a_finished_run(catch_run: list[str]) -> None:
    experiment = _Exits(parse_cli(catch_run))
    with pytest.raises(
        EnvError, match=r"reward function called sys.exit\(0\).*trainer.run_name=.*the same command starts"
    ):
        experiment.run()
    assert isinstance(experiment.exiting.exception(), SystemExit)


def test_a_setting_that_the_loss_ignores_is_logged_once(catch_run: list[str], caplog: pytest.LogCaptureFixture) -> None:
    settings = ["trainer.algorithm.policy_loss_type=cispo", "trainer.algorithm.eps_clip_low=0.1"]
    RLExperiment(parse_cli([*catch_run, *settings]))
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "trainer.algorithm.eps_clip_low=0.1 is ignored by trainer.algorithm.policy_loss_type=cispo"
    ]


def test_a_finished_run_is_reported_and_keeps_its_configuration(
    catch_run: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    short = [*catch_run, "trainer.max_training_steps=1", "trainer.eval_interval=-1"]
    run = train(*short, "trainer.policy.optimizer_config.num_warmup_steps=100")
    assert "num_warmup_steps=100 is not below the 1 optimizer steps of this run" in caplog.text
    assert "This run is finished" not in caplog.text
    config = (run.folder / "config.yaml").read_text()
    train(*short, "trainer.policy.optimizer_config.lr=0.5")
    assert "This run has already finished its 1 steps. To start a new one, set trainer.run_name" in caplog.text
    assert (run.folder / "config.yaml").read_text() == config


def test_an_estimator_registered_late_is_checked(catch_run: list[str]) -> None:
    experiment = RLExperiment(parse_cli([*catch_run, "trainer.algorithm.advantage_estimator=late"]))
    register_advantage_estimator("late")(lambda token_level_rewards, values: (token_level_rewards, values))
    try:
        with pytest.raises(ConfigError, match="=late needs a critic's values"):
            experiment.run()
    finally:
        ADVANTAGE_ESTIMATORS.unregister("late")


def test_the_chat_template_of_the_engine_replaces_a_broken_one(
    catch_run: list[str], tiny_model_path: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model_path, tmp_path / "model")
    file = tmp_path / "template.jinja"
    (model / "chat_template.jinja").write_text("{{ broken }")
    run = [*catch_run, f"trainer.policy.model.path='{model}'"]
    key = "generator.engine_init_kwargs.chat_template"
    with pytest.raises(ConfigError, match=f"is broken in line 1: .*; correct it, or set {re.escape(key)}$"):
        RLExperiment(parse_cli(run)).get_tokenizer()
    file.write_text("{{ messages[0].role }}")
    assert RLExperiment(parse_cli([*run, f"+{key}='{file}'"])).get_tokenizer().chat_template == file.read_text()
