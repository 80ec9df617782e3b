"""Generated files are up to date with the configuration sections."""

from pathlib import Path

import pytest
from dev import configuration

from skyrl_train.config.base import as_section
from skyrl_train.config.dialects import ALIASES, SKYRL_WITHOUT_EFFECT, UNSUPPORTED
from skyrl_train.config.problems import FIELDS
from skyrl_train.config.supervised import SFT


def test_the_generated_files_are_up_to_date() -> None:
    assert configuration.main(["--check"]) == 0, "run `python dev/configuration.py`"


def test_the_yaml_file_has_help_for_every_key_in_lines_of_120_columns() -> None:
    text = configuration.render_yaml()
    words = " ".join(line.strip().removeprefix("# ") for line in text.splitlines())
    for key, field in FIELDS.items():
        assert " ".join((field.description or "").split()) in words, key
    assert max(map(len, text.splitlines())) <= 120


def test_the_page_describes_every_key_and_every_alias() -> None:
    lines = [line for line in configuration.render_page().splitlines() if line.startswith("| `")]
    fields = [item for schema in configuration.COMMANDS.values() for item in schema.fields.items()]
    keys = {key for key, field in fields if as_section(field.annotation) is None}
    aliases = [*ALIASES, *SKYRL_WITHOUT_EFFECT, *UNSUPPORTED, *SFT.aliases]
    assert sorted(line.split("`")[1] for line in lines) == sorted([*keys, *aliases])
    rows = {line.split("`")[1]: line.split(" | ") for line in lines}
    assert {len(cells) for cells in rows.values()} == {3, 4, 5}
    size = rows["trainer.train_batch_size"]
    assert size[1:3] == ["all", "train: `1024`<br>sft, dpo, reward: `32`"]
    assert size[4].startswith("train: Number of prompts per training step.<br>sft, dpo, reward: Number of rows ")
    assert rows["data.response_key"][1:3] == ["sft", "`response`"]
    assert rows["trainer.ref.model.path"][1] == "`null`"  # all keys of the section are for the same commands
    assert "decides `trainer.algorithm.use_entropy_loss` too" in rows["actor_rollout_ref.actor.entropy_coeff"][2]
    assert "read if `trainer.algorithm.use_kl_in_reward`" in rows["algorithm.kl_ctrl.kl_coef"][2]
    assert "no effect" in rows["trainer.algorithm.value_head_prefix"][2]


def test_outdated_files_are_detected_with_check_and_written_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(configuration, "YAML_FOLDER", tmp_path)
    monkeypatch.setattr(configuration, "PAGE_PATH", tmp_path / "docs" / "b.md")
    assert configuration.main(["--check"]) == 1
    assert "ppo_base_config.yaml: out of date" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert configuration.main([]) == 0
    assert configuration.main(["--check"]) == 0
    assert (tmp_path / "ppo_base_config.yaml").read_text(encoding="utf-8") == configuration.render_yaml()
    (tmp_path / "ppo_base_config.yaml").write_text("old", encoding="utf-8")
    assert configuration.main(["--check"]) == 1
