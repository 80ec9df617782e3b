"""The training command: complete runs, and errors before a run starts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.algorithms import register_advantage_estimator
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS
from skyrl_train.dataset.files import Rows, read_rows, write_jsonl
from skyrl_train.entrypoints.main_base import BasePPOExp, main, parse_cli
from skyrl_train.entrypoints.preflight import check_data
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.tracking import read_metrics


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, assert that it refuses to start, and return its error message."""
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 1
    return capsys.readouterr().err.partition("error: ")[2]


def test_a_run_writes_its_folder(catch_run: list[str], tmp_path: Path) -> None:
    main([*catch_run, "trainer.dump_trajectories=true", "trainer.hf_save_interval=1"])
    folder = tmp_path / "skyrl/test_run"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files >= {
        "config.yaml",
        "metrics.jsonl",
        "train.log",
        "learning_curve.png",
        "report.html",
        "evals/global_step_0/synthetic_catch.jsonl",
        "evals/global_step_2/aggregated_results.jsonl",
        "trajectories/global_step_1.jsonl",
        "ckpts/latest_ckpt_global_step.txt",
        "ckpts/global_step_2/driver.pt",
        "ckpts/global_step_2/policy/.metadata",
        "export/global_step_2/policy/model.safetensors",
        "export/global_step_2/policy/tokenizer.json",
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert rows[2]["environment/avg_steps"] == 5  # the full number of turns
    assert "eval/environment/catch_rate" in rows[2]


@pytest.mark.parametrize("batched", ["true", "false"])
def test_batched_and_unbatched_rollouts_train(catch_run: list[str], tmp_path: Path, batched: str) -> None:
    main([*catch_run, f"generator.batched={batched}", "environment.skyrl_gym.max_env_workers=0"])
    rows = (tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["environment/avg_steps"] == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("trainer.polcy.model.path=x", ["trainer.polcy", "trainer.policy.model.path"]),
        ("trainer.epochs=three", ["trainer.epochs=three", "an integer >= 1"]),
        ("trainer.policy_mini_batch_size=3", ["trainer.policy_mini_batch_size=3", "trainer.train_batch_size=4", "try"]),
        ("data.train_data=[/no/such/file.parquet]", ["/no/such/file.parquet", "data.train_data"]),
        ("environment.env_class=catsh", ["catsh", "catch"]),
        ("trainer.algorithm.advantage_estimator=grop", ["advantage_estimator='grop'", "available: gae", "grpo"]),
        ("trainer.algorithm.policy_loss_type=ppo", ["policy_loss_type='ppo'", "regular"]),
        ("trainer.policy.model.path=/no/such/model", ["trainer.policy.model.path=/no/such/model", "no such folder"]),
        ("trainer.max_prompt_length=3", ["trainer.max_prompt_length=3", "raise it"]),
        ("trainer.resume_mode=from_path", ["trainer.resume_mode=from_path", "trainer.resume_path"]),
        ("trainer.train_batch_size=16", ["8 usable rows", "trainer.train_batch_size=16"]),
    ],
)
def test_mistakes_are_named_before_the_run_starts(
    catch_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, words: list[str]
) -> None:
    extra = ["trainer.policy_mini_batch_size=16"] if change == "trainer.train_batch_size=16" else []
    extra += ["data.train_data=[rows.jsonl]", "data.val_data=[rows.jsonl]"] if "catsh" in change else []
    if "catsh" in change:
        row = {"prompt": [{"role": "user", "content": "State"}]}
        rows = tmp_path / "rows.jsonl"
        rows.write_text("\n".join([json.dumps(row)] * 4))
        extra = [f"data.train_data=['{rows}']", f"data.val_data=['{rows}']"]
    message = refusal([*catch_run, change, *extra], capsys)
    for word in words:
        assert word in message
    assert not (tmp_path / "skyrl/test_run/metrics.jsonl").exists()


def test_a_setting_that_the_loss_ignores_is_logged_once(catch_run: list[str], caplog: pytest.LogCaptureFixture) -> None:
    BasePPOExp(
        parse_cli([*catch_run, "trainer.algorithm.policy_loss_type=cispo", "trainer.algorithm.eps_clip_low=0.1"])
    )
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "trainer.algorithm.eps_clip_low=0.1 is not read by trainer.algorithm.policy_loss_type=cispo"
    ]


def test_a_warmup_longer_than_the_run_is_reported(
    catch_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    main([*catch_run, "trainer.policy.optimizer_config.num_warmup_steps=100", "trainer.max_training_steps=1"])
    assert "num_warmup_steps=100 is not below the 1 optimizer steps of this run" in caplog.text


def test_settings_that_no_row_uses_are_reported(
    catch_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "1"}], "env_class": "gsm8k", "reward_spec": {"ground_truth": "1"}}
    rows.write_text("\n".join([json.dumps(row)] * 4))
    files = [f"data.train_data=['{rows}']", f"data.val_data=['{rows}']"]
    check_data(parse_cli([*catch_run, *files, "environment.env_class=catch"]), trains=True)
    assert "environment.env_class=catch is not used: every row has its own env_class (gsm8k)" in caplog.text
    check_data(parse_cli([*catch_run, *files, "environment.skyrl_gym.aime.grader=minerva"]), trains=True)
    assert "environment.skyrl_gym.aime is not used: no row has env_class=aime" in caplog.text


def test_a_subclass_with_a_generator_of_its_own_may_play_any_rows(catch_run: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "1"}], "env_class": "unheard_of"}')
    overrides = [*catch_run, f"data.train_data=['{rows}']", f"data.val_data=['{rows}']"]
    with pytest.raises(DataError, match="env_class=unheard_of"):
        BasePPOExp(parse_cli(overrides)).check_data()

    class Own(BasePPOExp):
        def get_generator(self, *arguments: Any) -> Any:
            raise NotImplementedError

    Own(parse_cli(overrides)).check_data()


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
    sample = Rows([str(source)]).sample(4)
    bad, unknown, refused = [i for i in range(len(rows)) if i not in sample][:3]
    rows[bad]["prompt"], rows[unknown]["env_class"] = "a text", "kaboom"
    rows[refused] |= {"env_class": "gsm8k", "reward_spec": {"method": "rule"}}
    write_jsonl(source, rows)
    command = [*catch_run, f"data.train_data=['{source}']", "data.max_checked_rows=4"]
    main([*command, "--dry-run"])
    assert f"{source} ({len(rows)} rows), a sample of 4 rows checked" in capsys.readouterr().out
    assert f"row {bad} of {source}: prompt='a text'" in refusal([*command, "data.max_checked_rows=null"], capsys)
    main([*command, "trainer.epochs=2"])
    assert f"The sample is of {len(rows)} rows, data.max_checked_rows=4" in caplog.text
    assert f"Skipped: row {bad} of {source}: prompt='a text' is not a list of messages" in caplog.text
    assert f"Skipped: row {unknown} of {source}: env_class=kaboom" in caplog.text
    assert f"Skipped: row {refused} of {source}: the environment gsm8k refuses it" in caplog.text
    assert read_metrics(tmp_path / "skyrl/test_run/metrics.jsonl")[-1]["data/n_skipped"] >= 1


def test_an_estimator_registered_late_is_checked(catch_run: list[str]) -> None:
    experiment = BasePPOExp(parse_cli([*catch_run, "trainer.algorithm.advantage_estimator=late"]))
    register_advantage_estimator("late")(lambda token_level_rewards, values: (token_level_rewards, values))
    try:
        with pytest.raises(ConfigError, match="=late reads the values of a critic"):
            experiment.run()
    finally:
        ADVANTAGE_ESTIMATORS.unregister("late")


def test_wandb_without_a_key_is_refused(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/no/such/netrc")
    message = refusal([*catch_run, "trainer.logger=wandb"], capsys)
    assert "WANDB_API_KEY" in message
    assert "WANDB_MODE=offline" in message


def test_a_dataset_without_prompts_is_refused(
    catch_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2 + 2?"}\n')
    message = refusal([*catch_run, f"data.train_data=['{rows}']"], capsys)
    assert "row 0" in message
    assert "'prompt'" in message
    assert "question" in message


def test_help_shows_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help", "trainer.train_batch_size"])
    assert "trainer.train_batch_size=1024" in capsys.readouterr().out


def test_a_finished_run_is_reported_and_keeps_its_configuration(
    catch_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    main(catch_run)
    config = (tmp_path / "skyrl/test_run/config.yaml").read_text()
    main([*catch_run, "trainer.policy.optimizer_config.lr=0.5"])
    assert "This run is finished" in caplog.text
    assert (tmp_path / "skyrl/test_run/config.yaml").read_text() == config


def test_a_run_resumes_from_resume_path(catch_run: list[str], tmp_path: Path) -> None:
    main([*catch_run, "trainer.ckpt_interval=1"])
    first_step = tmp_path / "skyrl/test_run/ckpts/global_step_1"
    resume = [*catch_run, "trainer.run_name=resumed", "trainer.resume_mode=from_path"]
    main([*resume, f"trainer.resume_path='{first_step}'"])
    rows, expected = (
        [json.loads(line) for line in (tmp_path / f"skyrl/{run}/metrics.jsonl").read_text().splitlines()]
        for run in ("resumed", "test_run")
    )
    assert [row["step"] for row in rows] == [2]
    for name in ("reward/avg_raw_reward", "policy/final_loss", "eval/all/avg_score"):
        assert rows[0][name] == expected[2][name]


def test_a_missing_resume_path_is_refused(
    catch_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "ckpts/global_step_7"
    message = refusal([*catch_run, "trainer.resume_mode=from_path", f"trainer.resume_path='{missing}'"], capsys)
    assert f"trainer.resume_path={missing} does not exist" in message


def test_the_chat_template_of_the_engine_replaces_a_broken_one(
    catch_run: list[str], tiny_model_path: Path, tmp_path: Path
) -> None:
    model, file = tmp_path / "model", tmp_path / "template.jinja"
    shutil.copytree(tiny_model_path, model)
    (model / "chat_template.jinja").write_text("{{ broken }")
    run = [*catch_run, f"trainer.policy.model.path='{model}'"]
    key = "generator.engine_init_kwargs.chat_template"
    with pytest.raises(ConfigError, match=f"is broken in line 1: .*; correct it, or set {re.escape(key)}$"):
        BasePPOExp(parse_cli(run)).get_tokenizer()
    file.write_text("{{ messages[0].role }}")
    assert BasePPOExp(parse_cli([*run, f"+{key}='{file}'"])).get_tokenizer().chat_template == file.read_text()
