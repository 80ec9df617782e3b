import re
from pathlib import Path

import pytest
import yaml
from train_kit.datasets import prompt_row
from train_kit.processes import run_python
from train_kit.runs import expect_error, small_run, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.config import load_config
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.entrypoints.cli import main


def test_env_check_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [prompt_row("6 * 7?", reward_spec={"ground_truth": "42"})])
    assert main(["env", "check", "multiply", "--data", str(tmp_path / "rows.jsonl")]) == 0
    assert re.search(r"multiply: \d+ passed, 0 failed", capsys.readouterr().out)  # a busy machine may add advice


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2)])
def test_the_commands_are_listed_and_suggested(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    output = "".join(capsys.readouterr())
    for command in ("train", "generate", "env", "tiny", "report"):
        assert f"\n  {command} " in output
    assert "No such command 'trian'. Did you mean 'train'" in expect_error(command="trian", status=2)


def test_keys_are_explained_and_the_configuration_is_printed(
    catch_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--help"]) == 0
    assert "\n  trainer.policy.optimizer_config  " in capsys.readouterr().out
    assert main(["train", "--help", "trainer.policy.optimizer_config", "trainer.epochs"]) == 0
    output = capsys.readouterr().out
    assert "trainer.policy.optimizer_config.lr=1e-06  a number >= 0 and <= 1000\n    Learning rate" in output
    assert "trainer.epochs=1  an integer >= 1" in output
    train(*catch_run, "--print-config")
    assert load_config(yaml.safe_load(capsys.readouterr().out)).trainer.train_batch_size == 4


def test_keys_are_completed_level_by_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_SKYRL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "skyrl train trainer.policy.")
    monkeypatch.setenv("COMP_CWORD", "2")
    main([])
    names = ["fsdp_config.", "megatron_config.", "model.", "optimizer_config.", "sequence_parallel_size="]
    assert sorted(capsys.readouterr().out.split()) == [f"trainer.policy.{name}" for name in names]


def test_a_tiny_model_is_written_once(catch_data: Path, tmp_path: Path) -> None:
    folder, data = tmp_path / "tiny", catch_data / "train.parquet"
    assert main(["tiny", str(folder), "--data", str(data)]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    message = expect_error(str(folder), "--data", "missing.jsonl", command="tiny")
    assert f"{folder} already exists; choose a new folder" in message
    assert "--data=missing.jsonl: the file missing.jsonl does not exist; use a .parquet, .json or" in message


def test_a_report_is_written_for_an_unfinished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "reward/avg_raw_reward": 0.5}\n')
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run/report.html")
    assert "avg_raw_reward" in (tmp_path / "run/report.html").read_text()
    assert "has no metrics.jsonl" in expect_error(str(tmp_path / "nothing"), command="report")


ENVIRONMENT = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Length(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.bonus = env_config.bonus

    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=self.bonus + len(action), done=True, metadata={})
"""


def test_an_environment_of_a_module_needs_no_registration(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "length_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    data = tmp_path / "rows.jsonl"
    write_jsonl(data, [prompt_row("State")] * 4)
    settings = ["environment.env_class=length_env:Length", "environment.skyrl_gym.Length.bonus=100"]
    run = train(*small_run(tmp_path, *settings, model=tiny_model_path, data=data))
    assert run.metrics[-1]["reward/avg_raw_reward"] >= 100


OWN_PROGRAM = """
from length_env import Length
from skyrl_gym.envs import register
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import main


class Quiet(RLExperiment):
    def get_callbacks(self, *args):
        print("a custom experiment")
        return super().get_callbacks(*args)


def register_length():
    register("length", Length)


if __name__ == "__main__":
    register_length()
    main(experiment=Quiet)
"""


def test_a_custom_program_has_the_options_of_skyrl_train(tiny_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "length_env.py").write_text(ENVIRONMENT)
    (tmp_path / "own.py").write_text(OWN_PROGRAM)
    write_jsonl(tmp_path / "rows.jsonl", [prompt_row("State", "length")] * 4)
    bonus = "environment.skyrl_gym.length.bonus=1"
    run = small_run(tmp_path / "outputs", bonus, model=tiny_model_path, data=Path("rows.jsonl"))
    assert "steps        1 " in run_python("own.py", *run, "--dry-run", cwd=tmp_path)
    assert "trainer.epochs=1" in run_python("own.py", "--help", "trainer.epochs", cwd=tmp_path)
    assert "a custom experiment" in run_python("own.py", *run, cwd=tmp_path)
    imports = "environment.imports=[own:register_length]"
    command = ("-m", "skyrl_train.entrypoints.cli", "train", "--dry-run", *run)
    assert "steps        1 " in run_python(*command, imports, cwd=tmp_path)
