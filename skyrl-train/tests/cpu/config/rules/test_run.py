from pathlib import Path

import pytest
from train_kit.rules import RuleContract, load

from skyrl_train.config import load_config, parse_cli, validate_cfg
from skyrl_train.config.rules import run
from skyrl_train.config.rules.run import find_wandb_problem
from skyrl_train.errors import ConfigError


class TestRun(RuleContract):
    module = run
    tested_elsewhere = ("_trained_sections", "wandb_can_start")  # the first yields settings


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove wandb's key and mode from the environment."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/no/such/netrc")
    return monkeypatch


def test_a_missing_login_is_refused_before_a_run_starts(no_login: pytest.MonkeyPatch) -> None:
    problem = find_wandb_problem({"WANDB_MODE": "online"})
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
    assert find_wandb_problem({"HOME": str(tmp_path)}) is None
    assert find_wandb_problem({"NETRC": str(tmp_path / ".netrc")}) is None
    assert find_wandb_problem({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.org"}) is not None


def test_the_configuration_of_a_finished_run_is_read_without_a_login(no_login: pytest.MonkeyPatch) -> None:
    assert load("trainer.logger=wandb").trainer.logger == ["wandb"]
