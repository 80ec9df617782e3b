"""Environments and the registry that finds them by name."""

from skyrl_gym.envs.registration import EnvSpec, deregister, make, pprint_registry, register, registry, spec

__all__ = ["EnvSpec", "deregister", "make", "pprint_registry", "register", "registry", "spec"]
