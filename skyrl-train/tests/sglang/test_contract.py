"""SGLang's own server, on a CPU, meets the engine contract."""

import copy
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from train_kit.engines import EngineKit, SharedEngines
from train_kit.own_logprobs_contract import OwnLogprobsContract
from train_kit.sglang_cpu import N_RESERVED_TOKENS, StartServer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(
    start_server: StartServer,
    tiny_model: PreTrainedModel,
    tiny_model_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[SharedEngines]:
    """Engines that call servers of SGLang."""
    weight_folder = tmp_path_factory.mktemp("weights")

    def start(**options: int) -> SGLangEngine:
        return SGLangEngine(start_server(**options), str(tiny_model_path), tiny_tokenizer, weight_folder)

    engines = SharedEngines(start, tiny_model, "shared")
    yield engines
    await engines.close()
    assert not list(weight_folder.iterdir()), "new weights are deleted once the server has them"


@pytest_asyncio.fixture(loop_scope="module")
async def engine_kit(
    engines: SharedEngines, tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> AsyncIterator[EngineKit]:
    """Engines with the initial weights."""
    limits = {"tolerance": 1e-4, "cache_block_size": 1, "n_reserved_tokens": N_RESERVED_TOKENS}
    yield EngineKit(engines.new, copy.deepcopy(tiny_model), tiny_tokenizer, **limits)
    await engines.reset()


class TestSGLangServerContract(OwnLogprobsContract):
    """The contract, with SGLang."""
