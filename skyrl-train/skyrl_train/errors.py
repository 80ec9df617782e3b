"""The one tree of errors: each class names the boundary at which something failed."""

from __future__ import annotations

import pickle


class SkyRLError(Exception):
    """The root of every error that this project raises on purpose: catch it to catch them all."""


class ConfigError(SkyRLError, ValueError):
    """The configuration is wrong: an unknown key, a wrong type, or values that cannot go together."""


class DataError(SkyRLError):
    """A dataset is missing, unreadable or too small, or one of its rows lacks what training needs."""


class EnvError(SkyRLError):
    """An environment could not be made, or broke its contract while it was played."""


class EngineError(SkyRLError):
    """An inference engine could not start, or could not answer a request."""


class CheckpointError(SkyRLError):
    """A checkpoint could not be written, is incomplete, or does not fit the run that loads it."""


class WorkerError(SkyRLError):
    """A rank of a model failed, and its group cannot be used any more."""


class SyncError(SkyRLError):
    """An engine did not receive the policy's weights, or received other ones than were sent."""


def picklable_error(error: Exception, substitute: type[SkyRLError]) -> Exception:
    """Return an error that survives pickling: the error itself, or a `substitute` that describes it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return copy if isinstance(copy, Exception) else substitute(repr(error))
    except Exception:  # noqa: BLE001, an error that cannot be pickled is described
        return substitute(f"{type(error).__name__}: {error}")
