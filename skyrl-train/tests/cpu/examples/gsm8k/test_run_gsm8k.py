"""`run_gsm8k.sh`: its data, its engine and its placement."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.algorithms.rules import ALGORITHM_WARNINGS
from skyrl_train.config import parse_cli
from skyrl_train.config.validation import WARNINGS, find_problems

TRAIN_FOLDER = Path(__file__).parents[4]
PYTHON = """#!/bin/sh
# Replaces Python: tells whether this machine has a GPU and vLLM, and prints modules with their arguments.
case "$2" in
*torch.cuda*) exit "$NO_GPU" ;;
*vllm*) exit "$NO_VLLM" ;;
esac
printf '%s\\n' "$@"
"""
Run = Callable[..., tuple[str, list[list[str]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the script; return its message about the engine, and each module that it runs, with the arguments."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run_script(*overrides: str, **variables: str) -> tuple[str, list[list[str]]]:
        environment = {"PYTHON": str(python), "DATA_DIR": str(tmp_path / "data"), "NO_GPU": "1", "NO_VLLM": "1"}
        command = ["bash", "examples/gsm8k/run_gsm8k.sh", *overrides]
        done = subprocess.run(
            command,
            cwd=TRAIN_FOLDER,
            env=os.environ | environment | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        *before, training = done.stdout.split("-m\n")
        message = before[-1].splitlines()[-1:] if before else []
        return "".join(message), [part.splitlines() for part in [*before[1:], training]]

    return run_script


def test_it_prepares_data_and_trains_on_it(run: Run, tmp_path: Path) -> None:
    _, (preparing, training) = run(SOURCE="sample")
    data = ["--output_dir", str(tmp_path / "data"), "--source", "sample"]
    assert preparing[:5] == ["examples.gsm8k.gsm8k_dataset", *data]
    assert training[0] == "skyrl_train.entrypoints.main_base"
    importlib.import_module(preparing[0]).main(data)
    _, (training,) = run("trainer.epochs=3", "trainer.algorithm.use_kl_loss=false")
    cfg = parse_cli(training[1:])
    assert find_problems(cfg, WARNINGS + ALGORITHM_WARNINGS) == []
    assert cfg.data.train_data == [f"{tmp_path}/data/train.parquet"]
    assert (cfg.trainer.epochs, cfg.trainer.algorithm.use_kl_loss) == (3, False)
    assert not cfg.trainer.placement.uses_ray
    named = run(f"data.train_data=['{tmp_path}/data/train.parquet']", DATA_DIR=str(tmp_path / "none"))
    assert len(named[1]) == 1


@pytest.mark.parametrize(
    ("machine", "message", "has_vllm"),
    [
        ({}, "No GPU here: sampling with the embedded engine", False),
        ({"NO_GPU": "0"}, "vLLM is not installed: sampling with the embedded engine", False),
        ({"NO_GPU": "0", "NO_VLLM": "0"}, "Sampling with vLLM", True),
    ],
)
def test_vllm_samples_on_a_gpu_where_it_is_installed(
    run: Run, machine: dict[str, str], message: str, has_vllm: bool
) -> None:
    printed, (*_, training) = run(**machine)
    assert printed == message
    assert ("generator.backend=vllm" in training) == has_vllm
    _, (*_, training) = run("generator.backend=hf", **machine)
    assert [word for word in training if word.startswith("generator.backend=")] == ["generator.backend=hf"]


def test_each_of_several_gpus_has_a_rank_and_an_engine(run: Run) -> None:
    _, (*_, training) = run(NUM_GPUS="4")
    cfg = parse_cli(training[1:])
    assert list(find_problems(cfg, WARNINGS)) == []
    assert cfg.trainer.placement.size("policy") == (1, 4)
    assert cfg.generator.num_inference_engines == 4
