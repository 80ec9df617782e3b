"""OpenSpiel positions: `data.custom_cls.name=OpenSpielDataset`, and cases of growing board size."""

from skyrl_gym.envs.openspiel.cases import BOARD_SIZE_CASES
from skyrl_gym.tasks.dataset import OpenSpielDataset
from skyrl_gym.tasks.openspiel import OpenSpielFamily

__all__ = ["DEFAULT_CASES_BOARD_SIZES", "OpenSpielDataset", "OpenSpielFamily"]

DEFAULT_CASES_BOARD_SIZES = list(BOARD_SIZE_CASES)
"""Example for `adapter_config.cases`: hex, go, breakthrough, dots and boxes, clobber, othello, chess, checkers."""
