from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.config import load_config, parse_cli
from skyrl_train.entrypoints.engine import new_engine
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.models.memory import cache_bytes_per_token

TOKEN_BYTES = 2 * 2 * 4 * 16 * 4  # keys and values, layers, heads, head_dim, float32


def test_cache_bytes_per_token(tiny_model: PreTrainedModel) -> None:
    assert cache_bytes_per_token(tiny_model) == TOKEN_BYTES
    assert cache_bytes_per_token(tiny_model, bf16=True) == TOKEN_BYTES  # a CPU computes in float32


@pytest.mark.parametrize(("backend", "free_bytes"), [("auto", 2**30), ("hf", 2**30), ("auto", 0)])
async def test_the_embedded_engine_gets_a_share_of_the_memory_that_the_trainer_leaves(
    backend: str, free_bytes: int, tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """`auto` and `hf` select the embedded engine. A trainer may need all memory."""
    cfg = load_config({"generator": {"backend": backend, "gpu_memory_utilization": 0.5}})
    bytes_to_come = psutil.virtual_memory().available - free_bytes if free_bytes else 2**60
    with ThreadPoolExecutor(1) as executor:
        engine = new_engine(cfg, tiny_model, tiny_tokenizer, bytes_to_come, executor)
        assert isinstance(engine, PackedEngine)
        assert engine._thread._executor is executor
        assert engine._memory.size * TOKEN_BYTES == pytest.approx(free_bytes / 2, rel=0.2)  # memory in use varies
        await engine.close()
        assert executor.submit(lambda: 7).result() == 7


def test_a_replacement_does_not_reserve_memory_again_that_the_first_update_has_allocated(catch_run: list[str]) -> None:
    reserved: list[int] = []

    class Recorder(Callback):
        async def on_step_end(self, run: Run, report: StepReport) -> None:
            reserved.append(experiment._reserved_bytes)

    class Recorded(RLExperiment):
        def get_callbacks(self, *parts: Any) -> list[Callback]:
            return [*super().get_callbacks(*parts), Recorder()]

    experiment = Recorded(parse_cli(catch_run))
    experiment.run()
    before, *after = reserved
    assert before > 0, "the first engine leaves room for gradients and moments"
    assert after == [0, 0]
