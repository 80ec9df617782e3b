"""SkyRL's names for the grading of SQL."""

from skyrl_gym.envs.sql.grading import compute_score, verify_format_and_extract

__all__ = ["compute_score", "verify_format_and_extract"]
