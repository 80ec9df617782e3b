"""A run that loses its console still reaches its last step and writes all checkpoints."""

import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_kit.datasets import prompt_row, write_answers
from train_kit.processes import python
from train_kit.runs import run_of, small_run, supervised_run

from skyrl_train.dataset.files import write_jsonl

ENV = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Talkative(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()

    def step(self, action):
        print("stepped", flush=True)
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action)), done=True, metadata={})
"""


@pytest.fixture(params=["pipe", "terminal"])
def console(request: pytest.FixtureRequest) -> Iterator[int]:
    """A console whose reader closes it after one byte."""
    if request.param == "pipe":
        reader, writer = os.pipe()
    else:
        reader, writer = pty.openpty()
    with subprocess.Popen(["head", "-c", "1"], stdin=reader, stdout=subprocess.DEVNULL):
        os.close(reader)
        yield writer
        os.close(writer)


@pytest.mark.parametrize("isolation", ["thread", "process", None], ids=["thread", "process", "sft"])
def test_a_run_survives_the_loss_of_its_console(
    console: int, isolation: str | None, tiny_model_path: Path, tmp_path: Path
) -> None:
    """The environment prints, too. Without an `isolation`, it is a supervised run."""
    common = ["trainer.logger=[console,jsonl]", "trainer.ckpt_interval=1", "trainer.epochs=2"]
    if isolation is None:
        module = "main_sft"
        overrides = supervised_run(tmp_path, *common, model=tiny_model_path, data=write_answers(tmp_path))
    else:
        module = "main_base"
        (tmp_path / "talk.py").write_text(ENV)
        data = tmp_path / "rows.jsonl"
        write_jsonl(data, [prompt_row(f"What is {n}?") for n in range(8)])
        environment = ["environment.env_class=talk:Talkative", f"environment.skyrl_gym.isolation={isolation}"]
        overrides = small_run(tmp_path, *common, *environment, model=tiny_model_path, data=data)
    command = [python(), "-m", f"skyrl_train.entrypoints.{module}", *overrides]
    finished = subprocess.run(command, stdout=console, stderr=console, cwd=tmp_path, check=False)
    run = run_of(overrides)
    assert finished.returncode == 0, run.log
    assert run.steps[-1] == run.checkpoints.steps()[-1] == 4
    assert "Storage:" not in run.log
    assert "invalid" not in run.log
    assert "Failed to write to standard" in run.log
