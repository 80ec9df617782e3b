from __future__ import annotations

from pathlib import Path

import pytest
from tx_backend_contract import LORA, STEP, BackendContract, datum, learn, request, run, sample, some_data

from tx.models.config import LoraConfig
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.types import Pass

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

    def test_nothing_is_compiled_again(self, backend: JaxBackend) -> None:
        def work(seed: int, lora: LoraConfig, temperature: float) -> None:
            backend.create_model(str(seed), lora)
            for n_data in (6, 3, 1):
                learn(backend, str(seed), some_data(seed)[:n_data], STEP)
            run(backend, Pass(str(seed), [datum(40, seed)], "cross_entropy", is_forward_only=True))
            prompt = datum(20, seed).tokens.tolist()
            asked = [request(prompt, n=n, seed=seed, temperature=temperature, top_k=n + seed) for n in (1, 5)]
            sample(backend, *((one, backend.weights_of(str(seed))) for one in asked))

        work(1, LORA, 1.0)
        n_compiled = backend.counts()["programs compiled"]
        work(2, LoraConfig(rank=5, seed=2), 0.5)
        assert backend.counts()["programs compiled"] == n_compiled
        run(backend, Pass("1", [datum(1500)], "cross_entropy", is_forward_only=True))
        assert backend.counts()["programs compiled"] == n_compiled + 1
