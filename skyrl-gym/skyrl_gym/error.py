"""One tree of errors. Each class takes only its message, so that every error survives pickling between processes.

Error
├── RegistrationError       a registration that cannot be accepted
│   └── InvalidSpec         a spec that cannot be built, written as JSON or read back (also a ValueError)
├── UnregisteredEnv         an id that this process's registry does not hold (also a ValueError)
├── InvalidAnswer           what an environment returned is not what it may return
└── ToolFailure             a tool's server does not answer: not the model's doing, so that the rollout is invalid
"""

from __future__ import annotations


class Error(Exception):
    """The root of everything that skyrl_gym raises about environments and their registry."""


class RegistrationError(Error):
    """An environment cannot be registered, e.g. because its id is taken."""


class InvalidSpec(RegistrationError, ValueError):
    """An `EnvSpec` cannot be built, written as JSON or read back."""


class UnregisteredEnv(Error, ValueError):
    """No environment with this id is registered in this process."""


class InvalidAnswer(Error):
    """An environment returned what it may not."""


class ToolFailure(Error):
    """What a tool depends on has failed; the model that called it has not."""
