from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from skyrl_gym.envs.openspiel.options import (
    finite_number,
    one_of,
    read_extra_info,
    reject_unknown,
    row_options,
    set_options,
    to_python,
    whole_number,
)


def test_config_and_rows_are_converted_to_python() -> None:
    section = OmegaConf.create({"cases": ["hex"], "mcts": {"uct_c": 1.5}, "seat": None})
    assert set_options(section) == {"cases": ["hex"], "mcts": {"uct_c": 1.5}}
    row = {"legal": np.array([{"id": np.int64(3), "text": "a1"}], dtype=object), "task_id": np.int64(7), "b": b"x"}
    assert to_python(row) == {"legal": [{"id": 3, "text": "a1"}], "task_id": 7, "b": b"x"}
    assert type(to_python(row)["task_id"]) is int
    assert set_options(None) == {}


@pytest.mark.parametrize("facts", [{"task_id": 3, "seat": None}, json.dumps({"task_id": 3, "seat": None})])
def test_extra_info_may_be_json(facts: Any) -> None:
    assert read_extra_info({"extra_info": facts}) == {"task_id": 3}


@pytest.mark.parametrize(
    ("facts", "message"),
    [("{task_id", "extra_info is text but not JSON"), ("[1]", "must be a mapping, got list"), (3, "got int: 3")],
)
def test_other_extra_info_is_refused(facts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_extra_info({"extra_info": facts})


def test_options_in_extra_info_take_precedence_over_columns() -> None:
    extras = {"seed": 1, "opponent": "mcts", "max_turns": 9, "other": 2, "extra_info": {"seed": 3, "max_turns": 4}}
    assert row_options(extras, {"seed", "opponent", "max_turns"}) == {"seed": 3, "opponent": "mcts", "max_turns": 4}


def test_unknown_option_names_the_closest_one() -> None:
    with pytest.raises(ValueError, match=r"mcts has no option 'n_world' \(=3\); did you mean 'n_worlds'"):
        reject_unknown({"n_world": 3}, ["n_worlds", "uct_c"], "mcts")
    with pytest.raises(ValueError, match="the options are: a, b"):
        reject_unknown({"zzz": 3}, ["b", "a"], "x")


def test_numbers_are_validated() -> None:
    assert whole_number(np.int64(4), "n", 1) == 4
    for value in (True, 1.0, "3", None):
        with pytest.raises(ValueError, match=r"n=.* must be a whole number"):
            whole_number(value, "n")
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        whole_number(0, "n", 1)
    assert finite_number(2, "x") == 2.0
    for value in (float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match=r"x=.* must be a finite number"):
            finite_number(value, "x")
    with pytest.raises(ValueError, match=r"x=-1 must be at least 0"):
        finite_number(-1, "x", 0.0)


def test_choice_must_be_known() -> None:
    assert one_of("a", "mode", ("a", "b")) == "a"
    with pytest.raises(ValueError, match="mode='c' is unknown; use one of a, b"):
        one_of("c", "mode", ("a", "b"))
