"""The engine that the scripts `run_*.sh` choose: vLLM on a GPU where it is installed, else the embedded one."""

from pathlib import Path

import pytest
from train_kit.example_scripts import record

VLLM, NO_VLLM = "Sampling with vLLM\n", "vLLM is not installed: sampling with the embedded engine\n"


@pytest.mark.parametrize(
    ("script", "has_gpu", "has_vllm", "message"),
    [
        ("catch/run_catch.sh", True, True, VLLM),
        ("catch/run_catch.sh", True, False, NO_VLLM),
        ("gsm8k/run_gsm8k.sh", True, True, VLLM),
        ("gsm8k/run_gsm8k.sh", True, False, NO_VLLM),
        ("gsm8k/run_gsm8k.sh", False, False, "No GPU here: sampling with the embedded engine\n"),
    ],
)
def test_vllm_samples_on_a_gpu_where_it_is_installed(
    script: str, has_gpu: bool, has_vllm: bool, message: str, tmp_path: Path
) -> None:
    command, machine = ["bash", f"examples/{script}"], {"has_gpu": has_gpu, "has_vllm": has_vllm}
    recording = record(command, tmp_path, **machine, DATA_DIR=str(tmp_path))
    assert recording.output == message
    assert ("generator.backend=vllm" in recording.training[1]) == has_vllm
    _, overrides = record([*command, "generator.backend=hf"], tmp_path, **machine, DATA_DIR=str(tmp_path)).training
    assert [word for word in overrides if word.startswith("generator.backend=")] == ["generator.backend=hf"]
