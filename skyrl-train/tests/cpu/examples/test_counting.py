"""The commands of the READMEs of `sft` and `dpo`, which teach models to count, or to prefer counts."""

import re
import shlex
from pathlib import Path

import pytest
from train_kit.processes import TRAIN_FOLDER
from train_kit.runs import Run

from examples.dpo import counting_pairs
from examples.sft import answer, counting_dataset
from skyrl_train.entrypoints.cli import main


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read_commands(example: str) -> list[list[str]]:
    """Return the words of each command in the README of an example."""
    readme = (TRAIN_FOLDER / "examples" / example / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    return [shlex.split(line) for line in block.replace("\\\n", " ").strip().splitlines()]


def run_commands(example: str, *flags: str) -> list[list[str]]:
    """Write the dataset and the tiny model, and run the training commands with more flags; return what follows."""
    script = {"sft": counting_dataset, "dpo": counting_pairs}[example]
    write, tiny, *commands = read_commands(example)
    assert write[:3] == ["python", "-m", script.__name__]
    script.main(write[3:])
    assert tiny[:2] == ["skyrl", "tiny"]
    assert main(tiny[1:]) == 0
    training = [command for command in commands if command[0] == "skyrl"]
    for command in training:
        assert main([*command[1:], *flags]) == 0
    return commands[len(training) :]


@pytest.mark.parametrize("example", ["sft", "dpo"])
def test_the_commands_are_accepted(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    following = run_commands(example, "--dry-run")
    assert [command[:3] for command in following] == (
        [["python", "-m", "examples.sft.answer"]] if example == "sft" else []
    )
    assert capsys.readouterr().out.count("train data") == (1 if example == "sft" else 2)


@pytest.mark.nightly
def test_fine_tuning_teaches_to_count() -> None:
    (ask,) = run_commands("sft")
    assert Path("outputs/skyrl/counting/report.html").is_file()
    assert answer.main(ask[3:]) > 10


@pytest.mark.nightly
def test_preferences_teach_to_prefer_counts() -> None:
    assert run_commands("dpo") == []
    for name, export, file in (("dpo", "policy", "adapter_config.json"), ("reward", "reward", "config.json")):
        run = Run(Path("outputs/skyrl", name))
        assert run.metrics[0]["train/loss"] == pytest.approx(0.693, abs=1e-3)
        assert run.metrics[-1]["train/loss"] < 0.2
        assert run.metrics[-1]["val/accuracy"] == 1
        assert (run.export(20, export) / file).is_file()
