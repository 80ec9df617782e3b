"""The errors of this package. Each class takes only its message, so that every error can be pickled.

Error
├── RegistrationError       a registration is refused
│   └── InvalidSpec         a spec cannot be built, written as JSON or read back (also a ValueError)
├── InvalidSettings         a section of the configuration is refused by its environment (also a ValueError)
├── UnregisteredEnv         this process's registry does not hold the id (also a ValueError)
├── InvalidAnswer           an environment returned an invalid value
└── ToolFailure             a tool fails through no fault of the model, which makes the rollout invalid
"""

from __future__ import annotations


class Error(Exception):
    """Base class of the errors that skyrl_gym raises."""


class RegistrationError(Error):
    """An environment cannot be registered, e.g. because its id is taken."""


class InvalidSpec(RegistrationError, ValueError):
    """An `EnvSpec` cannot be built, written as JSON or read back."""


class InvalidSettings(Error, ValueError):
    """The section `environment.skyrl_gym.<env_class>` is invalid, whatever the row: the message names its key."""


class UnregisteredEnv(Error, ValueError):
    """No environment with this id is registered in this process."""


class InvalidAnswer(Error):
    """An environment returned an invalid value."""


class ToolFailure(Error):
    """A service that a tool depends on has failed, through no fault of the model that called the tool."""
