"""The environments of the SDKs, which `make test-tinker` creates, and the programs that run in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from sdk.models import reference
from tx_kit.models import SHAPE

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / ".venv-tinker"
VERSIONS = tuple(sorted(path.stem for path in (HERE / "requirements").glob("[0-9]*.txt")))
NEWEST = VERSIONS[-1]
"""The version with which the cookbook runs."""
SECONDS = 240
"""Timeout for all tests of a client."""


def python(version: str) -> str:
    """Return the interpreter of an SDK."""
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
    server = {
        "url": url,
        "base_model": str(folder),
        "context": SHAPE["max_position_embeddings"],
        "is_compressing": is_compressing,
        "data": reference(folder),
    }
    file.write_text(json.dumps(server))
    return file


def run_client(interpreter: str, description: Path, home: Path) -> str:
    """Run the client tests with an interpreter; return their output. `home` gets the results as XML."""
    command = [interpreter, "-B", "-m", "pytest", "-q", f"--junitxml={home}/results.xml", HERE / "client"]
    variables = environment(home, TX_SDK_SERVER=str(description))
    done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=SECONDS)
    # Some SDKs occasionally abort when their process ends; pytest has reported everything by then.
    assert done.returncode in (0, -signal.SIGABRT), done.stdout[-20_000:] + done.stderr[-5_000:]
    return done.stdout
