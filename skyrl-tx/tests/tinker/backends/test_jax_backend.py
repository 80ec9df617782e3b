from __future__ import annotations

from pathlib import Path

import pytest
from tx_backend_contract import BackendContract

from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig

CONFIG = JaxConfig(sample_lanes=8, sample_groups=3, cache_gib=0.005)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> JaxBackend:
    """Programs are compiled once for all tests of a kind of model."""
    return JaxBackend(folder, "org/tiny", CONFIG)


class TestContract(BackendContract):
    @pytest.fixture
    def backend(self, loaded: JaxBackend) -> JaxBackend:
        for model_id in list(loaded.models()):
            loaded.delete_model(model_id)
        return loaded
