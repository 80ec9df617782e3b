"""The code blocks of the README and the quickstart run as typed, offline, in order, in one folder for each page.

A Python block that starts with a comment such as `# my_env.py` is written to that file; bash blocks run. Blocks after
`<!-- needs a download -->` are only parsed. `TEST_BIN=FOLDER` runs them with the programs in FOLDER (`make wheels`).
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from train_kit.processes import write_commands

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "docs/start/quickstart.md"]
PARSED_ONLY = [ROOT / "docs" / name for name in ("start/install.md", "start/gsm8k.md", "guides/multiple-gpus.md")]
BLOCK = re.compile(r"(<!-- needs a download -->\n)?^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATHS = [str(ROOT / package) for package in ("skyrl-train", "skyrl-gym", "skyrl-report")]


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    language: str
    code: str
    needs_download: bool

    @property
    def file_name(self) -> str:
        """The file that its first line names."""
        match = re.match(r"# (\w+\.py)\b", self.code)
        assert match, f"the first line must name a file: {self.code.splitlines()[0]}"
        return match[1]


def blocks(page: Path) -> Iterator[Block]:
    for marker, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        yield Block(language, code, bool(marker))


def page_id(page: Path) -> str:
    return page.stem


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables with which `python` and `skyrl` are those of this checkout, or of `TEST_BIN`."""
    if installed := os.environ.get("TEST_BIN"):
        path = os.pathsep.join([installed, os.environ["PATH"]])
        return os.environ | {"PATH": path, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(write_commands(tmp_path_factory.mktemp("bin"))), os.environ["PATH"]])
    python_path = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PATH": path, "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [PAGES[0], pytest.param(PAGES[1], marks=pytest.mark.nightly)], ids=page_id)
def test_every_block_runs_as_typed(page: Path, shell: dict[str, str], tmp_path: Path) -> None:
    n_run = 0
    for block in blocks(page):
        if block.language == "python":
            compile(block.code, block.file_name, "exec")
            (tmp_path / block.file_name).write_text(block.code, encoding="utf-8")
        elif not block.needs_download:
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            finished = subprocess.run(command, cwd=tmp_path, env=shell, capture_output=True, text=True, check=False)
            assert finished.returncode == 0, f"{block.code}\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
            n_run += 1
    assert n_run
    for metrics in tmp_path.glob("outputs/*/*/metrics.jsonl"):
        assert json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])["step"] >= 0


@pytest.mark.parametrize("page", [*PAGES, *PARSED_ONLY], ids=page_id)
def test_every_command_can_be_parsed(page: Path) -> None:
    for block in blocks(page):
        if block.language == "bash":
            finished = subprocess.run(["bash", "-n", "-c", block.code], capture_output=True, text=True, check=False)
            assert finished.returncode == 0, finished.stderr


def test_the_environment_of_the_readme_is_short() -> None:
    code = next(block.code for block in blocks(ROOT / "README.md") if block.language == "python")
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 15


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "AGENTS.md", "docs/internals/tests.md"])
def test_targets_of_make_and_paths_that_a_guide_names_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = (ROOT / name).read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", text, re.MULTILINE)) <= targets
    paths = re.findall(r"(?:skyrl-\w+|veritas-rl|benchmarks|dev|docs)/[\w./-]*", text)
    assert [path for path in paths if not (ROOT / path.rstrip(".")).exists()] == []
