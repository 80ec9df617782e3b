"""The command blocks of the documentation, with `--dry-run` where they train, and with 50 tasks in place of 1,000."""

import re
from pathlib import Path

import pytest
from veritas_kit.recipes import VERITAS, Recipes

PAGES = [VERITAS / "README.md", *sorted((VERITAS / "docs").glob("*.md"))]
STARTS_RUN = re.compile(r"((?:bash|\.) train/scripts/[\w-]+\.sh|\./train/docker_run_verl\.sh|skyrl (?:train|verl)\b)")
PLACEHOLDERS = ("<", "…", "http://", "https://", "wandb sync", "wandb artifact", "--tiny")
"""Parts of commands that need something of the reader's, a server, or minutes (`test_tiny.py` runs these)."""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


BLOCKS = [pytest.param(block, id=f"{page.stem}-{i}") for page in PAGES for i, block in enumerate(blocks(page))]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_commands_can_be_parsed(block: str, recipes: Recipes) -> None:
    result = recipes.shell(["bash", "-n", "-c", block])
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "block", [param for param in BLOCKS if not any(part in param.values[0] for part in PLACEHOLDERS)]
)
def test_a_block_of_commands_runs(block: str, recipes: Recipes) -> None:
    command = STARTS_RUN.sub(r"\1 --dry-run", block)
    command = command.replace("--num-samples 1000", "--num-samples 50").replace("train-0-999", "train-0-49")
    result = recipes.shell(["bash", "-e", "-c", command], HF_TOKEN="x")
    assert result.returncode == 0, result.stderr
