"""Run programs with real SDKs, in the environments that `make test-tinker` creates."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from tx_kit.models import SPECIAL, save_chat_model

SDK_TESTS = Path(__file__).parents[2] / "sdk"
ENVIRONMENTS = SDK_TESTS.parents[2] / ".venv-tinker"
VERSIONS = tuple(sorted(path.stem for path in (SDK_TESTS / "requirements").glob("[0-9]*.txt")))
NEWEST = VERSIONS[-1]
"""The version with which the cookbook runs."""
SECONDS = 240
"""Timeout for all tests of a client."""
SHARPNESS = 4.0
"""Scale of the logits: a tied head has no adapter to sharpen them."""
N_DATA, N_TOKENS = 6, 15


def save_model(family: str, folder: Path) -> Path:
    save_chat_model(family, folder, sharpness=SHARPNESS)
    return folder


def python(version: str) -> str:
    path = ENVIRONMENTS / version / "bin" / "python"
    assert path.exists(), f"{path} is not there; make test-tinker makes it"
    return str(path)


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment variables of a new user without a network."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TINKER_API_KEY": "tml-test",  # pragma: allowlist secret
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def write_description(file: Path, folder: Path, url: str, *, is_compressing: bool = False) -> Path:
    """Write the file that describes a server and its model to the client tests."""
    server = {"url": url, "base_model": str(folder), "is_compressing": is_compressing, "data": reference_data(folder)}
    file.write_text(json.dumps(server))
    return file


def run_client(interpreter: str, description: Path, home: Path) -> str:
    """Run the client tests with an interpreter; return their output. `home` gets the results as XML."""
    command = [interpreter, "-B", "-m", "pytest", "-q", f"--junitxml={home}/results.xml", SDK_TESTS / "client"]
    variables = environment(home, TX_SDK_SERVER=str(description))
    done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=SECONDS)
    # Some SDKs occasionally abort when their process ends; pytest has reported everything by then.
    assert done.returncode in (0, -signal.SIGABRT), done.stdout[-20_000:] + done.stderr[-5_000:]
    return done.stdout


def reference_data(folder: Path) -> list[dict[str, Any]]:
    """Return data and the log-probs of their targets, from Hugging Face."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(1)
    tokens = torch.randint(len(SPECIAL), model.config.vocab_size, (N_DATA, N_TOKENS + 1))
    weights = torch.rand(N_DATA, N_TOKENS)
    with torch.no_grad():
        logprobs = model(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return [
        {"tokens": row[:-1].tolist(), "targets": row[1:].tolist(), "weights": w.tolist(), "logprobs": lp.tolist()}
        for row, w, lp in zip(tokens, weights, logprobs, strict=True)
    ]


def processes_with(words: str) -> list[str]:
    """Return the command lines of running processes that contain these words."""
    lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    return [line for line in lines if words in line]
