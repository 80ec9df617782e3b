"""The commands and code in the README work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_environment_of_the_readme_trains(tiny_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(blocks("python")[0])
    row = blocks("json")[0].strip()
    for name in ("train.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text(f"{row}\n" * 4)
    lines = next(block for block in blocks("bash") if "my_env.py" in block).replace("\\\n", " ").splitlines()
    command = next(line for line in lines if line.startswith("python my_env.py")).split()
    command[0] = sys.executable
    command = [a if "model.path" not in a else f"trainer.policy.model.path={tiny_model_path}" for a in command]
    small = ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4"]
    small += ["generator.sampling_params.max_generate_length=4"]
    subprocess.run([*command, *small], cwd=tmp_path, check=True, capture_output=True)
    lines = (tmp_path / "outputs/skyrl/first/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


def test_the_environment_of_the_readme_has_at_most_fifteen_lines() -> None:
    code = [line for line in blocks("python")[0].splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 15


def test_commands_in_the_readme_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named <= targets
