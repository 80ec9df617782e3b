"""The commands of the README teach a model to count."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from examples.sft import answer, counting_dataset
from skyrl_train.entrypoints.cli import main

README = Path(__file__).parents[4] / "examples/sft/README.md"


@pytest.mark.nightly
def test_the_commands_of_the_readme_teach_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    write, tiny, sft, ask = (shlex.split(line) for line in block.replace("\\\n", " ").strip().splitlines())
    assert write[:3] == ["python", "-m", "examples.sft.counting_dataset"]
    counting_dataset.main(write[3:])
    assert tiny[0] == sft[0] == "skyrl"
    assert main(tiny[1:]) == 0
    assert main(sft[1:]) == 0
    assert ask[:3] == ["python", "-m", "examples.sft.answer"]
    assert os.path.isfile("outputs/skyrl/counting/report.html")
    assert answer.main(ask[3:]) > 10
