"""Programs that nobody has read, e.g. those a model wrote, in a process that is closed off."""

from skyrl_gym.isolation.program import Call, Limits, Outcome, Stdin, isolation_level, run_once, run_program

__all__ = ["Call", "Limits", "Outcome", "Stdin", "isolation_level", "run_once", "run_program"]
