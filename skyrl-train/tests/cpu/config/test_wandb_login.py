"""Detection of wandb credentials before anything else is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.config.rules.run import wandb_login_problem


@pytest.mark.parametrize("environ", [{"WANDB_API_KEY": "k"}, {"WANDB_MODE": "offline"}, {"WANDB_MODE": "disabled"}])
def test_a_key_or_an_offline_mode_suffices(environ: dict[str, str], tmp_path: Path) -> None:
    assert wandb_login_problem({"HOME": str(tmp_path), **environ}) is None


def test_a_missing_key_is_named_with_its_fixes(tmp_path: Path) -> None:
    problem = wandb_login_problem({"HOME": str(tmp_path), "WANDB_MODE": "online"})
    assert problem is not None
    for words in ("WANDB_API_KEY", "WANDB_MODE=offline", "trainer.logger=tensorboard"):
        assert words in problem


def test_a_wandb_login_is_found_in_the_netrc_file(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert wandb_login_problem({"HOME": str(tmp_path)}) is None
    assert wandb_login_problem({"NETRC": str(tmp_path / ".netrc")}) is None
    assert wandb_login_problem({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.org"}) is not None
