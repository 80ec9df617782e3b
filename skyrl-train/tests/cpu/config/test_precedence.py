import logging
from functools import partial
from pathlib import Path

import pytest
from train_kit import golden
from train_kit.rules import show_values

from skyrl_train.config import compose_config, load_config, parse_cli
from skyrl_train.config.precedence import apply_aliases
from skyrl_train.errors import ConfigError


def test_the_last_spelling_on_a_command_line_wins(pytestconfig: pytest.Config) -> None:
    cases = golden.read("config/last_wins").items()
    printed = {command: show_values(parse_cli(command.split()), settings) for command, settings in cases}
    golden.compare("config/last_wins", printed, pytestconfig)


@pytest.mark.parametrize("option", ["trainer.epochs=1", "trainer.total_epochs=1"])
@pytest.mark.parametrize("in_file", ["{epochs: 7}", "{total_epochs: 7}"])
def test_a_command_line_wins_over_a_file_in_any_spelling(option: str, in_file: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"trainer: {in_file}")
    assert parse_cli([option], file=tmp_path / "run.yaml").trainer.epochs == 1


def test_a_setting_that_is_overridden_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_cli(["trainer.total_epochs=10", "trainer.epochs=3", "trainer.eval_interval=7", "trainer.test_freq=8"])
    assert caplog.messages == [
        "trainer.total_epochs=10 is overridden by trainer.epochs=3",
        "trainer.eval_interval=7 is overridden by trainer.test_freq=8",
        "trainer.test_freq=8 is read as trainer.eval_interval=8",
    ]


def test_options_of_verl_with_different_meanings_do_not_override_each_other(pytestconfig: pytest.Config) -> None:
    printed = {
        line: [golden.catch(ConfigError, partial(parse_cli, line.split()))] for line in golden.read("config/conflicts")
    }
    golden.compare("config/conflicts", printed, pytestconfig)


@pytest.mark.parametrize("source", ["file", "mapping", "composed"])
def test_without_an_order_two_spellings_must_agree(source: str, tmp_path: Path) -> None:
    def load(total_epochs: int, epochs: int) -> int:
        trainer = {"total_epochs": total_epochs, "epochs": epochs}
        if source == "file":
            (tmp_path / "run.yaml").write_text(f"trainer: {trainer}")
            return parse_cli([], file=tmp_path / "run.yaml").trainer.epochs
        if source == "mapping":
            return load_config({"trainer": trainer}).trainer.epochs
        overrides = [f"++trainer.{name}={value}" for name, value in trainer.items()]
        return load_config(compose_config(overrides)).trainer.epochs

    error = "trainer.total_epochs=3 means trainer.epochs=3, but trainer.epochs={} was set too; remove one of them"
    assert golden.catch(ConfigError, lambda: load(3, 2)) == error.format(2)
    assert load(3, 3) == 3
    if source == "file":
        assert golden.catch(ConfigError, lambda: load(3, 1)) == error.format(1)
    else:
        assert load(3, 1) == 3  # 1 is the default, which a composed configuration always holds


def test_an_alias_for_two_keys_may_contradict_either() -> None:
    algorithm = {"use_entropy_loss": True}
    tree = {"actor_rollout_ref": {"actor": {"entropy_coeff": 0}}, "trainer": {"algorithm": algorithm}}
    assert golden.catch(ConfigError, lambda: load_config(tree)) == (
        "actor_rollout_ref.actor.entropy_coeff=0 means trainer.algorithm.use_entropy_loss=false, but "
        "trainer.algorithm.use_entropy_loss=true was set too; remove one of them"
    )


def test_a_tree_without_aliases_is_unchanged() -> None:
    tree = {"trainer": {"epochs": 2}, "actor_rollout_ref": 5, "generator": {"inference_engine": {}}}
    before = {"trainer": {"epochs": 2}, "actor_rollout_ref": 5, "generator": {"inference_engine": {}}}
    assert apply_aliases(tree) == []
    assert tree == before


def test_a_section_that_is_no_mapping_is_refused_whatever_is_read_into_it() -> None:
    with pytest.raises(ConfigError, match=r"^trainer=5 must be a section"):
        load_config({"trainer": 5, "data": {"train_batch_size": 4}})
