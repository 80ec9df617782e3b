"""Exceptions of this package. Each takes only its message, so every exception can be pickled.

Error
├── RegistrationError   a registration is rejected
│   └── InvalidSpec     a spec cannot be built, written as JSON or read back (also a ValueError)
├── InvalidSettings     an environment rejects its section of the configuration (also a ValueError)
├── UnregisteredEnv     this process's registry does not hold the id (also a ValueError)
├── UnreadableData      a data file cannot be read, or one of its rows is invalid
│   └── ChangedData     the file changed while it was used
├── InvalidAnswer       an environment returned an invalid value
├── EpisodeError        an environment in a thread or a worker process fails
│   ├── EnvTimeout      a call takes too long
│   └── EnvCrashed      the worker process ends
└── ToolFailure         a tool fails through no fault of the model, which makes the rollout invalid
"""


class Error(Exception):
    """Base class for the exceptions of skyrl_gym."""


class RegistrationError(Error):
    """The environment cannot be registered, e.g. because its id is taken."""


class InvalidSpec(RegistrationError, ValueError):
    """The `EnvSpec` cannot be built, written as JSON or read back."""


class InvalidSettings(Error, ValueError):
    """The section `environment.skyrl_gym.<env_class>` is invalid for every row. The message names the key."""


class UnregisteredEnv(Error, ValueError):
    """No environment with this id is registered in this process."""


class UnreadableData(Error):
    """A data file is missing or cannot be read, or one of its rows is invalid."""


class ChangedData(UnreadableData):
    """A data file changed while it was used."""


class InvalidAnswer(Error):
    """An environment returned an invalid value."""


class EpisodeError(Error):
    """An environment in a worker process could not be created, or failed."""


class EnvTimeout(EpisodeError):
    """A call of an environment, an agent, a task or a tool exceeded its time limit."""


class EnvCrashed(EpisodeError):
    """An environment's process ended in the middle of an episode."""


class ToolFailure(Error):
    """A service behind a tool failed, through no fault of the model that called it."""
