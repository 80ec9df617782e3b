import errno
import pickle

import pytest
from train_kit.shortages import SHORTAGES

from skyrl_train import errors
from skyrl_train.entrypoints.command import run_command
from skyrl_train.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "kind", [errors.ConfigError, errors.DataError, errors.EnvError, errors.EngineError, errors.CheckpointError]
)
def test_every_error_is_a_skyrl_error_and_survives_pickling(kind: type[errors.SkyRLError]) -> None:
    error = kind("what failed, with which value, what to do")
    assert isinstance(error, errors.SkyRLError)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (kind, str(error))


def test_a_shortage_of_memory_is_recognized_and_keeps_its_stage_in_another_process() -> None:
    error = pickle.loads(pickle.dumps(errors.OutOfMemoryError("the policy ran out of memory", "score")))
    assert (str(error), error.stage) == ("the policy ran out of memory", "score")
    assert all(map(is_out_of_memory, [error, OSError(errno.ENOMEM, "mmap"), *(make() for make in SHORTAGES.values())]))
    others = [OSError(errno.ENOSPC, "write"), RuntimeError("size mismatch"), errors.EngineError("out of memory")]
    assert not any(map(is_out_of_memory, others))


def test_divergence_has_an_exit_status_of_its_own() -> None:
    def fail() -> None:
        raise ExceptionGroup("tasks", [errors.EnvError("first"), errors.DivergenceError("second")])

    with pytest.raises(SystemExit) as stop:
        run_command(fail)
    assert stop.value.code == errors.DivergenceError.exit_status == 3
    assert errors.EnvError.exit_status == 1


class TwoPartError(Exception):
    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"{subject}: {reason}")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (errors.SyncError("not received"), errors.SyncError, "not received"),
        (ValueError("bad"), ValueError, "bad"),
        (TwoPartError("a", "b"), errors.EngineError, "TwoPartError: a: b"),  # unpickling lacks an argument
        (ValueError(lambda: None), errors.EngineError, "ValueError: <function"),
    ],
)
def test_an_error_that_cannot_be_pickled_is_described(error: Exception, kind: type[Exception], message: str) -> None:
    copy = pickle.loads(pickle.dumps(errors.picklable_error(error, errors.EngineError)))
    assert type(copy) is kind
    assert str(copy).startswith(message)
