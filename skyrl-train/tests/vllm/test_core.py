"""Starting and closing vLLM."""

import gc
import os
import random
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.entrypoints.tiny import tiny_qwen3
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.vllm.engine import VLLMEngine

NewEngine = Callable[..., VLLMEngine]
REQUEST = EngineRequest([5, 6, 7], SamplingParams(3, ignore_eos=True), seed=0)


def random_states() -> list[object]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blok_size": 32}, "vLLM cannot start with .*blok_size"),
        ({"async_scheduling": True}, "engine_init_kwargs.async_scheduling is set by the engine itself"),
        ({"path": Path("/no/such/folder")}, "vLLM cannot start with .*'/no/such/folder'"),
        ({"kv_cache_memory_bytes": 1 << 14}, "vLLM cannot start with .*No available memory"),
        ({"max_model_len": 600}, "vLLM cannot start with .*600"),
    ],
)
async def test_invalid_options_raise_and_another_engine_can_start(
    new_engine: NewEngine, options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = set(threading.enumerate())
    with pytest.raises(EngineError, match=message):
        new_engine(**options)
    assert set(threading.enumerate()) <= threads
    assert os.listdir(tmp_path) == []
    (result,) = await new_engine().generate([REQUEST])
    assert len(result.token_ids) == 3


async def test_a_model_that_cannot_run_raises_at_start(
    new_engine: NewEngine, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    tiny_qwen3(tiny_tokenizer, seed=0, head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"cannot run this model here; use generator.backend=hf: .*head_dim=16"):
        new_engine(tmp_path)
    assert len((await new_engine().generate([REQUEST]))[0].token_ids) == 3


async def test_a_second_engine_in_the_process_is_refused(new_engine: NewEngine) -> None:
    first = new_engine()
    with pytest.raises(EngineError, match=r"already has a vLLM engine; call close\(\)"):
        new_engine()
    assert len((await first.generate([REQUEST]))[0].token_ids) == 3
    await first.close()
    assert len((await new_engine().generate([REQUEST]))[0].token_ids) == 3


async def test_options_are_passed_to_vllm(new_engine: NewEngine) -> None:
    engine = new_engine(max_model_len=64)
    assert engine.info.context_length == 64


async def test_a_closed_engine_leaves_environment_random_state_and_threads_unchanged(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)  # earlier engines may have set them
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(123)  # a known state
    environment, states, set_num_threads = dict(os.environ), random_states(), torch.set_num_threads
    threads, children = set(threading.enumerate()), psutil.Process().children(recursive=True)
    engine = new_engine()
    assert dict(os.environ) == environment
    assert random_states() == states
    assert torch.set_num_threads is set_num_threads
    await engine.generate([REQUEST])
    assert os.listdir(tmp_path)
    await engine.close()
    assert os.listdir(tmp_path) == []
    assert set(threading.enumerate()) <= threads
    assert psutil.Process().children(recursive=True) == children
    assert dict(os.environ) == environment


async def test_a_closed_engine_holds_no_weights(new_engine: NewEngine) -> None:
    engine = new_engine()
    runner = engine._client.engine_core.model_executor.driver_worker.worker.model_runner
    weight = weakref.ref(runner.get_model().model.embed_tokens.weight)
    cache = weakref.ref(runner.kv_caches[0])
    del runner
    assert weight() is not None
    assert cache() is not None
    await engine.close()
    gc.collect()
    assert weight() is None
    assert cache() is None
