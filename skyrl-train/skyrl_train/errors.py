"""The exceptions of `skyrl_train`: one class for each boundary where something fails, and who raises it.

    SkyRLError                  base class; raised itself only by `skyrl doctor`, when a check fails
    ├── ConfigError             loading and checking the configuration, and components that reject a setting
    ├── DataError               datasets and the readers of run files; requests with invalid messages or parameters
    │   └── SkippedRow          datasets that check rows as they are drawn: a row is too long
    │       └── InvalidRow      the same datasets: a row is invalid
    ├── EnvError                generators and entry points: an environment or reward function fails, or every rollout
    │   └── UnknownReward       `generators.gym_generator`: an environment returns None as reward
    ├── EngineError             inference engines and their clients
    │   ├── SamplingError       engines with `scheduled.SamplingLimits`: a request's sampling has no log-probs
    │   └── EngineLostError     clients of an engine in another process, once that process is gone
    ├── CheckpointError         `checkpoint`, `run` and `workers.worker`, when saving, loading, merging or exporting
    ├── DivergenceError         `learner` and `run`, when they check the weights
    ├── StorageError            `run`, `entrypoints.base` and `dataset.files`: a file cannot be written, or has changed
    ├── OutOfMemoryError        `launch.process`, `workers.group`, engines and `entrypoints.base`: memory ran out
    ├── StalledError            `watchdog`: a wait has reached its limit
    ├── WorkerError             `workers` and `launch`, when a rank fails or its process ends
    └── SyncError               `weight_sync`, and both ends of a weight sync

`skyrl_report.errors` defines the base class and DataError. `skyrl_agent` adds EngineAborted under EngineError (`chat`)
and NoReward under EnvError (`agent_generator`). Errors of environments derive from `skyrl_gym.error.Error`, and reach
the trainer only as invalid trajectories.
"""

import pickle

from skyrl_gym.runtime.text import describe_error
from skyrl_report.errors import DataError, SkyRLError


class ConfigError(SkyRLError, ValueError):
    """The configuration is invalid: an unknown key, a wrong type, or values that contradict each other."""


class SkippedRow(DataError):
    """A row turns out to be too long when it is drawn. The next row replaces it."""


class InvalidRow(SkippedRow):
    """A row turns out to be invalid when it is drawn. The next row replaces it, with a warning."""


class EnvError(SkyRLError):
    """An environment could not be created, or broke its contract."""


class EngineError(SkyRLError):
    """An inference engine could not start, or could not answer a request."""


class SamplingError(EngineError):
    """An inference engine cannot sample with the parameters of a request and report log-probs."""


class EngineLostError(EngineError):
    """The process of an inference engine ended or stopped responding."""


class CheckpointError(SkyRLError):
    """A checkpoint could not be written, is incomplete, or does not fit the run that loads it."""


class DivergenceError(SkyRLError):
    """The weights of a model are NaN or infinite, or can no longer learn."""

    exit_status = 3


class StorageError(SkyRLError):
    """A file of the run cannot be written (the disk is full, read-only or broken), or changed while in use."""


class OutOfMemoryError(SkyRLError):
    """Memory of a GPU or of the host ran out, and smaller micro-batches cannot help."""

    exit_status = 4

    def __init__(self, message: str, stage: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        """Method of the worker that failed, e.g. "forward_backward", "load", or "generate" for an engine."""


class StalledError(SkyRLError):
    """A wait reached its limit: a weight sync, a rank, a disk or another part of a run does not answer."""

    exit_status = 5


class WorkerError(SkyRLError):
    """A rank of a model failed, and its group can no longer be used."""


class SyncError(SkyRLError):
    """An engine did not receive the policy's weights, or its weights differ from the weights that were sent."""


def picklable_error(error: Exception, substitute: type[SkyRLError]) -> Exception:
    """Return the error if it can be pickled, and otherwise a `substitute` with its description."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return copy if isinstance(copy, Exception) else substitute(repr(error))
    except Exception:  # noqa: BLE001, an error that cannot be pickled is described
        return substitute(describe_error(error))
