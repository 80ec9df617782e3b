import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import skyrl_gym
from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.optional import install_command, require

PACKAGE = Path(skyrl_gym.__file__).parent


def test_missing_package() -> None:
    require("json", "mine", "environments of mine")
    message = (
        r"environments of mine need the package no_such_package: pip install '\./skyrl-gym\[mine\]' \(in your clone"
    )
    with pytest.raises(ModuleNotFoundError, match=message):
        require("no_such_package", "mine", "environments of mine")


def test_named_extras_exist() -> None:
    extras = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = re.findall(r"""(?:install_command\(|require\("\w+", )['"](\w+)['"]""", source)
    assert len(named) >= 7
    assert set(named) <= extras.keys()
    assert "pip install 'skyrl-gym" not in source
    assert install_command("mcp") == "pip install './skyrl-gym[mcp]' (in your clone of the repository)"


@pytest.mark.parametrize(
    ("env_class", "config", "message"),
    [
        ("openenv", {"url": "http://h"}, r"websockets: pip install '\./skyrl-gym\[openenv\]'"),
        ("gymnasium", {"id": "FrozenLake-v1"}, r"gymnasium: pip install '\./skyrl-gym\[gymnasium\]'"),
        ("textarena", {"env_id": "TicTacToe-v0"}, r"textarena: pip install '\./skyrl-gym\[textarena\]'"),
    ],
)
def test_adapter_names_the_package_that_it_needs(
    env_class: str, config: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = load_attribute(BUILT_IN[env_class])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=message):
        adapter(config, {})
