import pytest

from tx.tinker.db_models import CheckpointKind
from tx.tinker.routes.runs import CLIENT_VERSION, readable_kinds


@pytest.mark.parametrize("version", ["0.16.1", "0.27.2", "0.9"])
def test_older_clients_support_two_kinds(version: str) -> None:
    assert readable_kinds({CLIENT_VERSION: version}) == (CheckpointKind.TRAINING, CheckpointKind.SAMPLER)


@pytest.mark.parametrize("version", ["0.28.0", "0.38.0", "1.0.0", "1", "", "0.x", "²"])
def test_other_clients_support_all_kinds(version: str) -> None:
    assert readable_kinds({CLIENT_VERSION: version}) == tuple(CheckpointKind)
