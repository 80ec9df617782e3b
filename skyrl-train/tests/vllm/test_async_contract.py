"""vLLM in processes of its own meets the engine contract."""

import asyncio
import copy
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from train_kit.engine_contract import EngineContract
from train_kit.engines import EngineKit, Listener, SharedEngines
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError, EngineLostError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def engine_kit(
    async_engines: SharedEngines, tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> AsyncIterator[EngineKit]:
    """Engines in other processes."""
    model = copy.deepcopy(tiny_model)
    yield EngineKit(async_engines.new, model, tiny_tokenizer, 1e-4, cache_block_size=32, transport="gloo")
    await async_engines.reset()


class TestAsyncVLLMContract(EngineContract):
    """The engine contract across processes."""


async def test_log_probs_equal_those_of_the_policy_after_each_of_many_updates(engine_kit: EngineKit) -> None:
    engine = engine_kit.new()
    for version in range(1, 21):
        engine_kit.add_noise(seed=version)
        await engine_kit.sync(engine, version)
        request = engine_kit.request(40, 12, seed=version, temperature=0.7, ignore_eos=True)
        (result,) = await engine.generate([request])
        assert result.weight_spans == ((version, 12),)
        assert result.logprobs == pytest.approx(engine_kit.trainer_logprobs(request, result), abs=1e-3)


async def test_weights_that_do_not_fit_are_refused_by_name(engine_kit: EngineKit) -> None:
    engine = engine_kit.new()
    engine_kit.model.model.layers[1].mlp = torch.nn.Identity()
    with pytest.raises(EngineError, match=r"no tensor for model\.layers\.1\.mlp\.down_proj\.weight and 1 other"):
        await engine_kit.sync(engine, 1)


async def test_a_killed_process_fails_its_requests(engine_kit: EngineKit) -> None:
    before = set(psutil.Process().children(recursive=True))
    engine = engine_kit.new(max_num_seqs=3)  # not shared
    children = set(psutil.Process().children(recursive=True)) - before
    listener = Listener(engine, engine_kit.request(10, 400, ignore_eos=True))
    await listener.wait_for(3)
    for child in children:
        child.kill()
    with pytest.raises(EngineError, match="vLLM's process ended"):
        await listener.result()
    with pytest.raises(EngineError, match=r"the engine cannot continue after .* create a new one"):
        await engine.generate([engine_kit.request(10, 4)])
    await engine.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in left)  # killed, and not yet reaped


async def test_calls_that_wait_for_a_killed_process_fail(engine_kit: EngineKit) -> None:
    before = set(psutil.Process().children(recursive=True))
    engine = engine_kit.new(max_num_seqs=5)  # not shared
    await engine.generate([engine_kit.request(10, 4)])
    children = set(psutil.Process().children(recursive=True)) - before
    for child in children:
        child.suspend()
    sleeping = asyncio.create_task(engine.sleep())
    await asyncio.sleep(0.5)
    assert not sleeping.done()
    for child in children:
        child.kill()
    async with asyncio.timeout(30):
        with pytest.raises(EngineLostError, match="vLLM's process ended"):
            await sleeping
        with pytest.raises(EngineLostError, match="vLLM's process ended"):
            await engine.check_health()
    await engine.close()


START_AND_HANG = """
import asyncio, sys, time
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.vllm.engine import AsyncVLLMEngine
from skyrl_train.models.loading import load_tokenizer

async def main():
    options = {"model": sys.argv[1], "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
    engine = AsyncVLLMEngine(options, load_tokenizer(sys.argv[1]))
    await engine.generate([EngineRequest([5, 6, 7], SamplingParams(2), 0)])
    print("ready", flush=True)
    time.sleep(300)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_killed_owner_leaves_no_process(tiny_model_path: Path, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(START_AND_HANG)
    with subprocess.Popen([sys.executable, str(script), str(tiny_model_path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        while owner.stdout.readline().strip() != b"ready":
            assert owner.poll() is None
        children = psutil.Process(owner.pid).children(recursive=True)
        assert any("EngineCore" in " ".join([child.name(), *child.cmdline()]) for child in children)
        owner.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blok_size": 32}, "vLLM cannot start with .*blok_size"),
        ({"async_scheduling": True}, r"engine_init_kwargs\.async_scheduling is set by the engine itself"),
    ],
)
async def test_invalid_options_raise_at_once(engine_kit: EngineKit, options: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        engine_kit.new(**options)
