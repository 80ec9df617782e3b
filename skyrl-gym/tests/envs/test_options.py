import numpy as np
import pytest
from omegaconf import OmegaConf

from skyrl_gym.envs.options import finite_number, reject_unknown, row_options, set_options
from skyrl_gym.envs.row import whole_number


def test_options_of_the_section_and_the_row() -> None:
    section = OmegaConf.create({"cases": ["hex"], "mcts": {"uct_c": 1.5}, "seat": None})
    assert set_options(section) == {"cases": ["hex"], "mcts": {"uct_c": 1.5}}
    assert set_options(None) == {}
    extras = {"seed": 1, "opponent": "mcts", "max_turns": 9, "other": 2, "extra_info": {"seed": 3, "max_turns": 4}}
    assert row_options(extras, {"seed", "opponent", "max_turns"}) == {"seed": 3, "opponent": "mcts", "max_turns": 4}


def test_unknown_option_names_the_closest_one() -> None:
    with pytest.raises(ValueError, match=r"mcts has no option 'n_world' \(=3\); did you mean 'n_worlds'"):
        reject_unknown({"n_world": 3}, ["n_worlds", "uct_c"], "mcts")
    with pytest.raises(ValueError, match="the options are: a, b"):
        reject_unknown({"zzz": 3}, ["b", "a"], "x")


def test_numbers_are_validated() -> None:
    assert whole_number(np.int64(4), "n", 1) == 4
    assert finite_number(2, "x") == 2.0
    for value in (True, 1.0, "3", None):
        with pytest.raises(ValueError, match=r"n=.* must be a whole number"):
            whole_number(value, "n")
    for value in (float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match=r"x=.* must be a finite number"):
            finite_number(value, "x")
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        whole_number(0, "n", 1)
    with pytest.raises(ValueError, match=r"x=-1 must be at least 0"):
        finite_number(-1, "x", 0.0)
