"""The commands in the READMEs of `examples/algorithms` are valid."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.algorithms.rules import ALGORITHM_WARNINGS
from skyrl_train.config.validation import WARNINGS, find_problems
from skyrl_train.entrypoints.command import parse_cli

FOLDER = Path(__file__).parents[4] / "examples/algorithms"
READMES = sorted(FOLDER.rglob("README.md"))


def commands(readme: Path) -> Iterator[list[str]]:
    """Yield the words of each command in a README."""
    for block in re.findall(r"```bash\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_commands_are_accepted(readme: Path, record: Callable[..., Any]) -> None:
    for command in commands(readme):
        is_script = command[0] == "bash"
        argv = record(command)[1] if is_script else command[3:]
        assert is_script or command[:3] == ["python", "-m", "skyrl_train.entrypoints.main_base"]
        warnings = find_problems(parse_cli(argv), WARNINGS + ALGORITHM_WARNINGS)
        assert warnings == [], shlex.join(command)


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*/run_*.sh")), ids=lambda path: path.stem)
def test_each_script_is_in_the_readme_of_its_folder(script: Path) -> None:
    typed = [command[:2] for command in commands(script.parent / "README.md")]
    assert ["bash", f"examples/algorithms/{script.parent.name}/{script.name}"] in typed


def test_every_folder_is_listed() -> None:
    listed = re.findall(r"^\| \[`([^`]+)`\]\(\1/README.md\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(readme.parent.name for readme in READMES if readme.parent != FOLDER)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_links_have_targets(readme: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", readme.read_text(encoding="utf-8"))
    assert not [link for link in links if not (readme.parent / link).exists()]
