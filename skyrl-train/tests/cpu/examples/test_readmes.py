"""The commands, keys and links in the READMEs of the examples; those of the algorithms have further tests."""

import dataclasses
import importlib
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_gym.chat_endpoint import EndpointConfig
from skyrl_gym.cli import main as skyrl_gym
from skyrl_gym.envs.lcb.env import LCBEnvConfig
from skyrl_gym.envs.openspiel.game_env import GameConfig
from skyrl_gym.envs.openspiel.opponents import MctsConfig
from skyrl_gym.envs.search.env import SearchEnvConfig
from skyrl_gym.envs.sql.env import Text2SQLEnvConfig
from skyrl_train.algorithms.rules import ALGORITHM_WARNINGS
from skyrl_train.config.problems import FIELDS
from skyrl_train.config.rules import WARNINGS, find_problems
from skyrl_train.entrypoints.command import parse_cli

FOLDER = Path(__file__).parents[3] / "examples"
NAMES = ("aime", "gsm8k", "livecodebench", "multiply", "openspiel", "search", "text_to_sql")
READMES = [FOLDER / name / "README.md" for name in NAMES]
MAIN = "skyrl_train.entrypoints.main_base"
KEY = re.compile(r"\b(?:data|trainer|generator)\.\w+(?:\.\w+)*")
SETTINGS = {
    "environment.skyrl_gym.lcb.": LCBEnvConfig,
    "environment.skyrl_gym.openspiel_game.": GameConfig,
    "environment.skyrl_gym.openspiel_game.mcts.": MctsConfig,
    "environment.skyrl_gym.openspiel_game.policy.": EndpointConfig,
    "environment.skyrl_gym.search.": SearchEnvConfig,
    "environment.skyrl_gym.text2sql.": Text2SQLEnvConfig,
}


def commands(readme: Path) -> Iterator[tuple[list[str], str]]:
    """Yield the words of each command in a README after shell expansion, and its trailing comment."""
    for block in re.findall(r"```bash\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(os.path.expandvars(line.replace(" ~/", " $HOME/")), comments=True):
                yield words, line.partition(" # ")[2]


def modules(readme: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yield the modules that a README runs, with their arguments and comments."""
    for words, comment in commands(readme):
        if words[:2] == ["python", "-m"]:
            yield words[2], words[3:], comment


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(FOLDER.parent)


def test_every_example_has_a_readme() -> None:
    assert not [file.parent for file in FOLDER.glob("*/__init__.py") if not file.with_name("README.md").is_file()]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_training_commands_are_accepted(readme: Path) -> None:
    training = [argv for module, argv, _ in modules(readme) if module == MAIN]
    assert len(training) == (0 if readme.parent.name == "gsm8k" else 1)  # gsm8k has a script
    for argv in training:
        assert find_problems(parse_cli(argv), WARNINGS + ALGORITHM_WARNINGS) == []


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_the_data_can_be_prepared_and_played(
    readme: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that need the Hub fail only because the Hub is offline."""
    for module in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)
    prepare_commands = [words for words in modules(readme) if words[0].endswith("_dataset")]
    assert any("needs the Hub" not in comment for *_, comment in prepare_commands)
    for module, argv, comment in prepare_commands:
        monkeypatch.setattr(sys, "argv", [module, *argv])
        if "needs the Hub" not in comment:
            runpy.run_module(module, run_name="__main__")
            assert "Wrote " in capsys.readouterr().out
        else:
            with pytest.raises(SystemExit):
                runpy.run_module(module, run_name="__main__")
            assert "from the Hugging Face Hub" in capsys.readouterr().err
    (play,) = [words for words, _ in commands(readme) if words[:3] == ["skyrl", "env", "play"]]
    skyrl_gym(["check", *play[3:]])
    assert " 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_all_modules_scripts_and_keys_exist(readme: Path) -> None:
    for module, *_ in modules(readme):
        assert importlib.util.find_spec(module) is not None
    for words, _ in commands(readme):
        script = next((word for word in words if word.endswith(".sh")), None)
        assert words[0] in ("python", "skyrl", "pip") or (script and (FOLDER.parent / script).is_file()), words
    text = readme.read_text(encoding="utf-8")
    known = {*FIELDS, "generator.reward_weights.legal", "generator.reward_weights.outcome"}
    assert set(KEY.findall(text)) <= known
    for prefix, table in re.findall(r"^\| key, after `([\w.]+)` \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE):
        for keys in re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE):
            for key in re.findall(r"`([^`]+)`", keys):
                section, _, name = (prefix + key).rpartition(".")
                assert name in {field.name for field in dataclasses.fields(SETTINGS[section + "."])}, key
