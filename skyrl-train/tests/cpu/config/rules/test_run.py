from __future__ import annotations

from pathlib import Path

import pytest
from train_kit.rules import Cases, RuleContract, load

from skyrl_train.config import load_config, parse_cli, validate_cfg
from skyrl_train.config.rules import run
from skyrl_train.config.rules.run import wandb_login_problem
from skyrl_train.errors import ConfigError

WARMUP = "trainer.critic.optimizer_config.num_warmup_steps=3 trainer.critic.optimizer_config.warmup_ratio=0.1"
MATRICES = "trainer.critic.model.lora.lora_path=adapter trainer.critic.model.lora.target_modules=[q_proj]"
BUCKET = "s3://my-bucket"

REFUSED: Cases = {
    # warmup_is_set_once
    WARMUP: ["trainer.critic.optimizer_config.num_warmup_steps=0"],
    # weight_decay_shrinks_weights
    "trainer.policy.optimizer_config.weight_decay=1e6": ["trainer.policy.optimizer_config.weight_decay=1.0"],
    # rollouts_are_scored_exactly
    "trainer.policy.model.lora.rank=4 trainer.policy.model.lora.dropout=0.1": [],
    # adapters_are_possible
    MATRICES: ["trainer.critic.model.lora.lora_path=null trainer.critic.model.lora.rank=4"],
    # names_are_folders
    "trainer.run_name=a/../b": ["trainer.run_name=a.b", "trainer.run_name=sweep/lr_1e-6"],
    "trainer.run_name='a::b'": ["trainer.run_name='a:b'"],
    "trainer.project_name='a::b' trainer.run_name=c": [],
    # resume_path_is_a_checkpoint
    "trainer.resume_mode=from_path": [
        "trainer.resume_path=ckpts/global_step_10",
        "trainer.resume_path=global_step_10/",
    ],
    "trainer.resume_mode=from_path trainer.resume_path=ckpts/": [],
    # checkpoints_are_uploaded
    "trainer.remote_ckpt_url=my-bucket": [f"trainer.remote_ckpt_url={BUCKET}"],
    f"trainer.remote_ckpt_url={BUCKET} trainer.ckpt_interval=-1": [],
    # trajectories_are_uploaded
    f"trainer.remote_trajectory_url={BUCKET} trainer.dump_eval_results=false": [],
    # wandb_settings_have_a_run
    "trainer.wandb_artifacts=true": ["trainer.logger=[jsonl,wandb]"],
    "trainer.wandb_environment=[GAME_TYPES]": ["trainer.logger=[jsonl,wandb]"],
    "trainer.wandb_environment=[HF_TOKEN] trainer.logger=wandb": ["trainer.wandb_environment=[GAME_TYPES]"],
}
WARNED: Cases = {
    # settings_have_an_effect
    "generator.async_engine=false": ["generator.async_engine=true"],
    "trainer.flash_attn=false": ["trainer.flash_attn=true"],
    # adapters_are_on
    "trainer.policy.model.lora.alpha=32": ["trainer.policy.model.lora.rank=8"],
    # resume_path_is_read
    "trainer.resume_path=ckpts/global_step_10": [],
}


class TestRun(RuleContract):
    module, refused, warned = run, REFUSED, WARNED
    tested_elsewhere = ("_optimizers", "_adapters", "wandb_can_start")  # the first two yield settings


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove wandb's key and mode from the environment."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/no/such/netrc")
    return monkeypatch


def test_a_missing_login_is_refused_before_a_run_starts(no_login: pytest.MonkeyPatch) -> None:
    problem = wandb_login_problem({"WANDB_MODE": "online"})
    for words in ("WANDB_API_KEY", "WANDB_MODE=offline", "trainer.logger=tensorboard"):
        assert words in problem
    for start in (
        lambda: parse_cli(["trainer.logger=[console,wandb]"]),
        lambda: validate_cfg({"trainer": {"logger": ["console", "wandb"]}}),
        lambda: validate_cfg(load_config({"trainer": {"logger": ["console", "wandb"]}})),
    ):
        with pytest.raises(ConfigError) as caught:
            start()
        assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("name", "value"),
    [("WANDB_API_KEY", "k"), ("WANDB_MODE", "offline"), ("WANDB_MODE", "disabled"), ("WANDB_MODE", "OFFLINE")],
)
def test_a_key_or_an_offline_mode_is_accepted(no_login: pytest.MonkeyPatch, name: str, value: str) -> None:
    no_login.setenv(name, value)
    assert parse_cli(["trainer.logger=wandb"]).trainer.logger == ["wandb"]


def test_a_login_is_found_in_the_netrc_file(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert wandb_login_problem({"HOME": str(tmp_path)}) is None
    assert wandb_login_problem({"NETRC": str(tmp_path / ".netrc")}) is None
    assert wandb_login_problem({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.org"}) is not None


def test_the_configuration_of_a_finished_run_is_read_without_a_login(no_login: pytest.MonkeyPatch) -> None:
    assert load("trainer.logger=wandb").trainer.logger == ["wandb"]
