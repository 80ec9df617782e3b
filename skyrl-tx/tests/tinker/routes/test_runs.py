import pytest

from tx.tinker.db_models import CheckpointKind
from tx.tinker.routes.runs import CLIENT_VERSION, readable_kinds


@pytest.mark.parametrize("version", ["0.16.1", "0.27.2", "0.9", "0.28.0", "0.38.0", "1.0.0", "1", "", "0.x", "²"])
def test_clients_before_0_28_support_two_kinds(version: str) -> None:
    is_old = version in ("0.16.1", "0.27.2", "0.9")
    two = (CheckpointKind.TRAINING, CheckpointKind.SAMPLER)
    assert readable_kinds({CLIENT_VERSION: version}) == (two if is_old else tuple(CheckpointKind))
