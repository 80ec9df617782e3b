import json
import math
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from train_kit import golden

from skyrl_train.config import load_config
from skyrl_train.config.base import FREE_VALUE
from skyrl_train.config.problems import nearest_keys, show
from skyrl_train.errors import ConfigError


def find_error(override: str) -> str:
    """Return the error of one override, whose value is YAML: '3' is a string, 3 is a number."""
    return golden.catch(ConfigError, lambda: load_config(OmegaConf.from_dotlist([override])))


def test_wrong_keys_and_values(pytestconfig: pytest.Config) -> None:
    printed = {override: [find_error(override)] for override in golden.read("config/wrong_values")}
    golden.compare("config/wrong_values", printed, pytestconfig)


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"custom": {"kind": Path}}, f"custom.kind={Path} must be {FREE_VALUE}"),
        ({"custom": {"a": {"b": [{"c": math.inf}]}}}, f"custom.a={{b:[{{c:inf}}]}} must be {FREE_VALUE}"),
        ({"gdpo": {"weights": {"format": "high", "v1.1": 1}}}, "gdpo.weights.format=high must be a number"),
        ({"gdpo": {"weights": {"v1.1": None}}}, "gdpo.weights.v1.1=null must be a number"),
    ],
)
def test_wrong_values_of_open_sections(algorithm: dict[str, Any], sentence: str) -> None:
    error = golden.catch(ConfigError, lambda: load_config({"trainer": {"algorithm": algorithm}}))
    assert error == f"trainer.algorithm.{sentence}"


def test_a_value_is_shown_in_command_line_syntax(pytestconfig: pytest.Config) -> None:
    golden.compare(
        "config/shown", {case: [show(json.loads(case))] for case in golden.read("config/shown")}, pytestconfig
    )
    assert show((0.9, 0.99)) == "[0.9,0.99]"


def test_up_to_three_nearest_keys_are_suggested(pytestconfig: pytest.Config) -> None:
    suggested = {key: nearest_keys(key) for key in golden.read("config/nearest_keys")}
    assert max(map(len, suggested.values())) == 3
    golden.compare("config/nearest_keys", suggested, pytestconfig)
