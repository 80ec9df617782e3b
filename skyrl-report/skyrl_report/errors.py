"""The exceptions of this package. `skyrl_train.errors` derives its own from the same base class."""


class SkyRLError(Exception):
    """Base class of all errors that this project raises on purpose."""

    exit_status = 1
    """Exit status of a command that the error ends."""


class DataError(SkyRLError):
    """Data is missing, unreadable or too small, or one of its rows is invalid: a dataset, or a file of a run."""
