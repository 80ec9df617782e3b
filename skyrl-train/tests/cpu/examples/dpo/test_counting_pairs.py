"""The commands of the README teach a model and a reward model to prefer counts."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from examples.dpo import counting_pairs
from skyrl_train.entrypoints.cli import main

README = Path(__file__).parents[4] / "examples/dpo/README.md"


def test_the_commands_of_the_readme_teach_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    write, *commands = (shlex.split(line) for line in block.replace("\\\n", " ").strip().splitlines())
    assert write[:3] == ["python", "-m", "examples.dpo.counting_pairs"]
    counting_pairs.main(write[3:])
    for command in commands:
        assert command[0] == "skyrl"
        assert main(command[1:]) == 0
    for name in ("dpo", "reward"):
        first, *_, last = Path(f"outputs/skyrl/{name}/metrics.jsonl").read_text().splitlines()
        assert json.loads(first)["train/loss"] == pytest.approx(0.693, abs=1e-3)
        assert json.loads(last)["train/loss"] < 0.2
        assert json.loads(last)["val/accuracy"] == 1
    assert Path("outputs/skyrl/dpo/export/global_step_20/policy/adapter_config.json").is_file()
    assert Path("outputs/skyrl/reward/export/global_step_20/reward/config.json").is_file()
