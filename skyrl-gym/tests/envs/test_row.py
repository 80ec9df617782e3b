from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from skyrl_gym.envs.row import (
    parse_settings,
    read_answer,
    read_extra_info,
    read_ground_truth,
    read_max_turns,
    to_python,
)
from skyrl_gym.runtime.env_config import EnvConfig


@pytest.mark.parametrize(
    ("truth", "text"), [("42", "42"), (" 42\n", "42"), (42, "42"), (np.int64(-7), "-7"), ("x + 1", "x + 1"), (0, "0")]
)
def test_the_ground_truth_is_text_or_a_whole_number(truth: object, text: str) -> None:
    assert read_answer({"reward_spec": {"ground_truth": truth}}) == text
    assert read_answer(OmegaConf.create({"reward_spec": {"ground_truth": text}})) == text


def test_ground_truth_may_be_anything_but_an_answer_may_not() -> None:
    fields = ("reward_model", "reward_spec")
    row = {"reward_model": {"ground_truth": "1"}, "reward_spec": {"ground_truth": "2"}}
    assert read_answer(row, fields) == "1"
    assert read_answer(row | {"reward_model": None}, fields) == "2"
    for truth in (42.0, ["42"], {"a": 1}):
        assert read_ground_truth({"reward_spec": {"ground_truth": truth}}) == truth
        with pytest.raises(ValueError, match=r"ground_truth=.* must be text or a whole number, got"):
            read_answer({"reward_spec": {"ground_truth": truth}})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"data_source": "mine"}, r"reward_spec field is required: add .* which has \['data_source'\]"),
        ({"reward_spec": None}, "reward_spec field is required"),
        ({"reward_spec": {}}, r"ground_truth is required in reward_spec field; got reward_spec=\{\}"),
        ({"reward_spec": {"ground_truth": None}}, "ground_truth is required in reward_spec field"),
        ({"reward_spec": {"ground_truth": " "}}, "ground_truth is required in reward_spec field"),
        ({"reward_spec": "42"}, "ground_truth is required in reward_spec field; got reward_spec='42'"),
    ],
)
def test_a_row_without_ground_truth_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        read_answer(row)


@pytest.mark.parametrize(
    ("row", "max_turns"),
    [
        ({}, 5),
        ({"max_turns": 2}, 2),
        ({"max_turns": 2, "extra_info": {"max_turns": 3}}, 2),
        ({"max_turns": None, "extra_info": {"max_turns": np.int32(3)}}, 3),
        ({"extra_info": None}, 5),
        ({"extra_info": '{"max_turns": 3}'}, 3),
        ({"extra_info": {"max_turns": None}}, 5),
    ],
)
def test_max_turns(row: dict[str, Any], max_turns: int) -> None:
    assert read_max_turns(row, 5) == max_turns


@pytest.mark.parametrize(("max_turns", "message"), [(0, "at least 1"), (2.0, "a whole number, got float")])
def test_invalid_max_turns_is_refused(max_turns: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"max_turns={max_turns}.*must be {message}"):
        read_max_turns({"max_turns": max_turns}, 5)


@dataclass(frozen=True)
class Settings:
    """A section with two keys."""

    topk: int = 3
    url: str = "here"


@pytest.mark.parametrize("config", [dict, EnvConfig, OmegaConf.create], ids=["dict", "EnvConfig", "OmegaConf"])
def test_settings_are_read_from_the_section(config: Any) -> None:
    assert parse_settings("mine", config({"topk": 5}), Settings) == Settings(5)
    assert parse_settings("mine", None, Settings) == Settings()
    for name, hint in (("top_k", r"did you mean topk\?"), ("zzz", "the keys are: topk, url")):
        with pytest.raises(ValueError, match=rf"environment\.skyrl_gym\.mine\.{name} is unknown; {hint}"):
            parse_settings("mine", config({name: 1}), Settings)


def test_rows_are_converted_to_python() -> None:
    row = {"legal": np.array([{"id": np.int64(3), "text": "a1"}], dtype=object), "task_id": np.int64(7), "b": b"x"}
    assert to_python(row) == {"legal": [{"id": 3, "text": "a1"}], "task_id": 7, "b": b"x"}
    assert type(to_python(row)["task_id"]) is int
    assert to_python({"kind": np.ndarray}) == {"kind": np.ndarray}  # other objects are kept


@pytest.mark.parametrize(
    ("facts", "message"),
    [("{task_id", "is text but not JSON"), ("[1]", r"extra_info=\[1\] of a dataset row must be"), (3, "extra_info=3")],
)
def test_extra_info_is_a_dict_or_json(facts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_extra_info({"extra_info": facts})
    for valid in ({"task_id": 3, "seat": None}, '{"task_id": 3, "seat": null}'):
        assert read_extra_info({"extra_info": valid}) == {"task_id": 3}
