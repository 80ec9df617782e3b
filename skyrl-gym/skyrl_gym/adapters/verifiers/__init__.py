"""Environments of the package verifiers as text environments."""

from skyrl_gym.adapters.verifiers.env import VerifiersEnv, rows

__all__ = ["VerifiersEnv", "rows"]
