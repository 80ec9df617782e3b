"""Text environments for reinforcement learning of language models.

skyrl_gym.register(id="multiply", entry_point="my_project.multiply:MultiplyEnv")
env = skyrl_gym.make("multiply", env_config={}, extras=row)
"""

from skyrl_gym import envs, error, metrics
from skyrl_gym.core import Env, EnvStepOutput
from skyrl_gym.envs.registration import EnvSpec, deregister, make, pprint_registry, register, registry, spec

__all__ = [
    "Env",
    "EnvSpec",
    "EnvStepOutput",
    "deregister",
    "envs",
    "error",
    "make",
    "metrics",
    "pprint_registry",
    "register",
    "registry",
    "spec",
]
