"""One tree of errors, which crosses process boundaries."""

from __future__ import annotations

import pickle

import pytest

from skyrl_train import errors


@pytest.mark.parametrize(
    "kind", [errors.ConfigError, errors.DataError, errors.EnvError, errors.EngineError, errors.CheckpointError]
)
def test_every_error_is_one_of_ours_and_survives_pickling(kind: type[errors.SkyRLError]) -> None:
    error = kind("what failed, with which value, what to do")
    assert isinstance(error, errors.SkyRLError)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (kind, str(error))
