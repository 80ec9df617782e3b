"""OpenEnv servers' environments as text environments."""

from skyrl_gym.adapters.openenv.env import OpenEnvEnv

__all__ = ["OpenEnvEnv"]
