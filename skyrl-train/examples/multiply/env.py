"""The environment, under the module name that SkyRL's script registers."""

from skyrl_gym.envs.multiply.env import MultiplyEnv

__all__ = ["MultiplyEnv"]
