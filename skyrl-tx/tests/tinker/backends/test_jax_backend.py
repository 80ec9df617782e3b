from __future__ import annotations

from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_several_devices_compute_the_same(folder: Path, loaded: JaxBackend) -> None:
    sizes = {"fully_sharded_data_parallel_size": 2, "tensor_parallel_size": 2}
    several = JaxBackend(folder, "org/tiny", CONFIG.model_copy(update=sizes))
    down = several.base_weights().params.blocks[0]["down"]
    assert {shard.data.size * 4 for shard in down.addressable_shards} == {down.size}
    found, data = [], [datum(20, seed) for seed in range(4)]
    for backend in (loaded, several):
        for rank in (0, 8):
            backend.create_model(f"rank {rank}", LoraConfig(rank=rank, seed=1))
            learned = [learn(backend, f"rank {rank}", data, STEP) for _ in range(3)]
            (sampled,) = sample(backend, (request(temperature=0.0), backend.weights_of(f"rank {rank}")))
            found.append((learned, [one.tokens for one in sampled.samples]))
    for one, other in zip(found[:2], found[2:], strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-4)
        assert one[1] == other[1]


def test_more_devices_than_there_are(models: Path) -> None:
    with pytest.raises(ValueError, match=r"size=3 × tensor_parallel_size=2 needs 6 devices, and there are 4 \(cpu\)"):
        JaxBackend(models / "llama", "org/tiny", JaxConfig(fully_sharded_data_parallel_size=3, tensor_parallel_size=2))
