"""The errors of this project, one class for each boundary at which something fails."""

from __future__ import annotations

import pickle

from skyrl_gym.runtime.text import describe_error


class SkyRLError(Exception):
    """Base class of all errors that this project raises on purpose."""

    exit_status = 1
    """Exit status of a command that the error ends."""


class ConfigError(SkyRLError, ValueError):
    """The configuration is invalid: an unknown key, a wrong type, or values that contradict each other."""


class DataError(SkyRLError):
    """A dataset is missing, unreadable or too small, or one of its rows is invalid."""


class SkippedRow(DataError):
    """A row that is checked when it is drawn is too long. Another one is drawn instead."""


class InvalidRow(SkippedRow):
    """A row that is checked when it is drawn is invalid. Another one is drawn instead, after a warning."""


class EnvError(SkyRLError):
    """An environment could not be created, or broke its contract."""


class EngineError(SkyRLError):
    """An inference engine could not start, or could not answer a request."""


class EngineLostError(EngineError):
    """The process of an inference engine has ended, or no longer answers."""


class CheckpointError(SkyRLError):
    """A checkpoint could not be written, is incomplete, or does not fit the run that loads it."""


class DivergenceError(SkyRLError):
    """The weights of a model are NaN or infinite, or can no longer learn."""

    exit_status = 3


class StorageError(SkyRLError):
    """The file system refused a file of the run: it is full, read-only or broken."""


class WorkerError(SkyRLError):
    """A rank of a model failed, and its group can no longer be used."""


class SyncError(SkyRLError):
    """An engine did not receive the policy's weights, or received different ones than were sent."""


def picklable_error(error: Exception, substitute: type[SkyRLError]) -> Exception:
    """Return an error that survives pickling: the error itself, or a `substitute` that describes it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return copy if isinstance(copy, Exception) else substitute(repr(error))
    except Exception:  # noqa: BLE001, an error that cannot be pickled is described
        return substitute(describe_error(error))
