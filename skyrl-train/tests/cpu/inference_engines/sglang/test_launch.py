import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest
from train_kit.processes import python
from transformers import PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.sglang.engine import SGLangEngine, launch_server, list_arguments


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return python(), "-m", "train_kit.sglang_server"


def test_options_become_arguments() -> None:
    options = {
        "tp_size": 2,
        "trust_remote_code": True,
        "enable_lora": False,
        "revision": None,
        "lora_paths": ["a", "b"],
    }
    assert list_arguments(options) == ["--tp-size", "2", "--trust-remote-code", "--lora-paths", "a", "b"]


async def test_a_launched_server_ends_with_its_engine(
    command: tuple[str, ...], tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    children = psutil.Process().children()
    address, end_server = await asyncio.to_thread(launch_server, {"model_path": str(tiny_model_path)}, 60.0, command)
    engine = SGLangEngine(address, str(tiny_model_path), tiny_tokenizer, tmp_path, end_server)
    (result,) = await engine.generate([EngineRequest([5, 6, 7], SamplingParams(4, ignore_eos=True), seed=0)])
    assert len(result.token_ids) == 4
    await engine.close()
    assert psutil.Process().children() == children


def test_a_server_that_cannot_start_is_an_error(command: tuple[str, ...]) -> None:
    with pytest.raises(EngineError, match=r"SGLang ended with exit status \d+ before it was ready"):
        launch_server({"model_path": "/no/such/folder"}, 60.0, command)
    with pytest.raises(EngineError, match=r"engine_init_kwargs\.port is set by the engine itself"):
        launch_server({"model_path": "x", "port": 1}, 60.0, command)
    message = r"SGLang was not ready in 0\.1 s; .* raise generator\.engine_start_timeout_seconds"
    with pytest.raises(EngineError, match=message):
        launch_server({"model_path": "x"}, 0.1, (sys.executable, "-c", "import time; time.sleep(60)"))
