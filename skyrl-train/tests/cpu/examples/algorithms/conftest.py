from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import skyrl_gym
from examples import tiny_model
from examples.catch import warm_start
from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.recipe import TINY_MODEL
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Registry
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.models.tiny import tiny_qwen3

TRAIN_FOLDER = Path(__file__).parents[4]

RECORDER = """#!/usr/bin/env bash
# Replaces Python: reports no vLLM, and a GPU or none; prints the recipe, and other command lines a word per line.
case "$*" in
  -c*vllm*) exit 1 ;;
  -c*) exit {no_gpu} ;;
  "-m examples.catch.recipe") cat "$RECIPE" ;;
  *) printf '%s\\n' "$@" ;;
esac
"""

Record = Callable[..., tuple[str, list[str]]]


@pytest.fixture(scope="session")
def catch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Catch data and a `model` that replies in the right format, but plays badly."""
    folder = tmp_path_factory.mktemp("catch")
    write_dataset(CatchDataset(train_size=100, test_size=4), folder)
    with pytest.MonkeyPatch.context() as constants:
        constants.setattr(tiny_model, "BATCH_SIZE", 8)
        for name, value in (("N_CONVERSATIONS", 100), ("N_STEPS", 60)):
            constants.setattr(warm_start, name, value)
        warm_start.make_model(folder / "train.parquet", folder / "model", seed=0)
    return folder


@pytest.fixture(scope="session")
def teacher(catch: Path) -> Path:
    """The path of a different model with the same tokenizer."""
    tokenizer = load_tokenizer(str(catch / "model"))
    tiny_qwen3(tokenizer, seed=1).save_pretrained(catch / "teacher")
    tokenizer.save_pretrained(catch / "teacher")
    return catch / "teacher"


@pytest.fixture
def record(catch: Path, teacher: Path, tmp_path: Path) -> Record:
    """Run a command up to the start of training; return the module it would run, and its arguments."""
    (tmp_path / "recipe").write_text("\n".join(TINY_MODEL))

    def run(command: Sequence[str], *, has_gpu: bool = False, **variables: str) -> tuple[str, list[str]]:
        python = tmp_path / f"python-{has_gpu}"
        python.write_text(RECORDER.format(no_gpu=int(not has_gpu)))
        python.chmod(0o755)
        places = {
            "DATA_DIR": str(catch),
            "MODEL_DIR": str(catch / "model"),
            "TEACHER": str(teacher),
            "RECIPE": str(tmp_path / "recipe"),
            "PYTHON": str(python),
        }
        finished = subprocess.run(
            command, cwd=TRAIN_FOLDER, env=os.environ | places | variables, capture_output=True, text=True, check=True
        )
        lines = finished.stdout.splitlines()
        module, *argv = lines[lines.index("-m") + 1 :]  # after the notes of the script
        return module, argv

    return run


@pytest.fixture
def _own_registries() -> Iterator[None]:
    """Unregister everything that a script registered."""
    registries: tuple[Registry, ...] = (ADVANTAGE_ESTIMATORS, POLICY_LOSSES)
    before = [registry.list_available() for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry.list_available()) - set(names):
            registry.unregister(name)
    if "catch" in skyrl_gym.envs.registration.registry:
        skyrl_gym.envs.deregister("catch")
