"""SkyRL's names for the grading of programs."""

from skyrl_gym.envs.lcb.grading import extract_code as extract_code_from_model
from skyrl_gym.envs.lcb.grading import grade, parse_tests

__all__ = ["extract_code_from_model", "grade", "parse_tests"]
