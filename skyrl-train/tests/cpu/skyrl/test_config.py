"""Configurations that scripts of SkyRL's new layout parse and extend."""

import subprocess
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import pytest
import yaml
from skyrl.train.config import (
    AlgorithmConfig,
    GeneratorConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    get_config_as_yaml_str,
    make_config,
)
from train_kit.processes import TRAIN_FOLDER, python

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import validate_cfg
from skyrl_train.errors import ConfigError


@dataclass
class PenaltyConfig(AlgorithmConfig):
    overlong_buffer_len: int = 12
    penalty: float = 0.5
    stages: list[str] = field(default_factory=lambda: ["a"])


@dataclass
class LongTrainerConfig(TrainerConfig):
    n_warmup: int = 1


@dataclass
class ToolGeneratorConfig(GeneratorConfig):
    max_tools: int | None = None
    n_samples_per_prompt: int = 3


@dataclass
class WithSection(SkyRLTrainConfig):
    trial: dict[str, Any] = field(default_factory=dict)


def test_overrides_are_parsed_into_a_configuration() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.epochs=3", "generator.inference_engine.max_num_seqs=2"])
    assert isinstance(cfg, SkyRLConfig)
    assert (cfg.trainer.epochs, cfg.generator.max_num_seqs) == (3, 2)
    assert validate_cfg(cfg).trainer.epochs == 3
    assert SkyRLTrainConfig.from_cli_overrides({"trainer.epochs": 3, "trainer.run_name": "a b"}).trainer.epochs == 3


def test_sections_may_be_json() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(
        ['environment.skyrl_gym.judge={"model": "small", "limits": {"tries": 2}}', "environment.skyrl_gym.tool={a:1}"]
    )
    assert cfg.environment.skyrl_gym.env_config("judge") == {"model": "small", "limits": {"tries": 2}}
    assert cfg.environment.skyrl_gym.env_config("tool") == {"a": 1}


def test_keys_of_the_engine_are_read_in_their_new_section() -> None:
    cfg: Any = SkyRLTrainConfig.from_cli_overrides(["generator.inference_engine.backend=hf"])
    engine = cfg.generator.inference_engine
    assert (engine.backend, engine.num_engines, engine.tensor_parallel_size) == ("hf", 1, 1)
    with pytest.raises(AttributeError, match=r"generator.inference_engine.nonsense is not a key"):
        _ = engine.nonsense


def test_dataclasses_add_keys_and_change_defaults() -> None:
    parser = make_config(PenaltyConfig, LongTrainerConfig, ToolGeneratorConfig)
    cfg: Any = parser.from_cli_overrides(["trainer.algorithm.penalty=0.7", "generator.max_tools=2"])
    algorithm = cfg.trainer.algorithm
    assert (algorithm.overlong_buffer_len, algorithm.penalty, algorithm.stages) == (12, 0.7, ["a"])
    assert (cfg.trainer.n_warmup, cfg.generator.max_tools, cfg.generator.n_samples_per_prompt) == (1, 2, 3)
    assert parser.from_cli_overrides(["trainer.algorithm.overlong_buffer_len=7"]).trainer.algorithm.overlong_buffer == (
        7,
        1.0,
    )
    assert validate_cfg(cfg) == cfg
    assert yaml.safe_load(get_config_as_yaml_str(cfg))["trainer"]["algorithm"]["penalty"] == 0.7


def test_a_dataclass_adds_sections() -> None:
    cfg: Any = WithSection.from_cli_overrides(["trial.agent.name=x"])
    assert cfg.trial == {"agent": {"name": "x"}}


def test_an_extended_configuration_reaches_other_processes() -> None:
    cfg = make_config(algorithm_cls=PenaltyConfig).from_cli_overrides(["trainer.run_name=run"])
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).trainer.algorithm.penalty)"
    done = subprocess.run(
        [python(), "-c", code], input=cloudpickle.dumps(cfg), cwd=TRAIN_FOLDER, capture_output=True, timeout=100
    )
    assert done.stdout == b"0.5\n", done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trainer.epoch=3", "trainer.epoch=3: there is no key trainer.epoch; did you mean trainer.epochs"),
        ("trainer.algorithm.penalty=high", "trainer.algorithm.penalty=high must be a number"),
    ],
)
def test_mistakes_are_listed(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(algorithm_cls=PenaltyConfig).from_cli_overrides([line])


def test_a_mistake_on_the_command_line_ends_the_process_with_one_message() -> None:
    code = "import sys; from skyrl.train.config import SkyRLTrainConfig as C; C.from_cli_overrides(sys.argv[1:])"
    command = [python(), "-c", code, "trainer.epoch=3"]
    done = subprocess.run(command, cwd=TRAIN_FOLDER, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr == "error: trainer.epoch=3: there is no key trainer.epoch; did you mean trainer.epochs?\n"
