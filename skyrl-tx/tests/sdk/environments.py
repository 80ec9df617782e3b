"""The environments of the SDKs, which `make test-tinker` makes, and what programs in them are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from sdk.models import reference
from tx_tiny_models import SHAPE

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / ".venv-tinker"
VERSIONS = tuple(sorted(path.stem for path in (HERE / "requirements").glob("[0-9]*.txt")))
NEWEST = VERSIONS[-1]
"""With this one, there is the cookbook."""
SECONDS = 240
"""For all tests of a client."""


def python(version: str) -> str:
    """The interpreter with an SDK."""
    path = ENVIRONMENTS / version / "bin" / "python"
    assert path.exists(), f"{path} is not there; make test-tinker makes it"
    return str(path)


def environment(home: Path, **more: str) -> dict[str, str]:
    """Variables for a program of a user who has nothing yet, and no network."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TINKER_API_KEY": "tml-test",  # pragma: allowlist secret
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def tell(file: Path, folder: Path, url: str, *, is_compressing: bool = False) -> Path:
    """The file, with what the tests of a client are told of a server, whose model is in a folder."""
    server = {
        "url": url,
        "base_model": str(folder),
        "context": SHAPE["max_position_embeddings"],
        "is_compressing": is_compressing,
        "data": reference(folder),
    }
    file.write_text(json.dumps(server))
    return file


def run_client(interpreter: str, told: Path, home: Path) -> str:
    """Run the tests of a client with the SDK of an interpreter; what they say. Results are in `home`, as XML."""
    command = [interpreter, "-B", "-m", "pytest", "-q", f"--junitxml={home}/results.xml", HERE / "client"]
    variables = environment(home, TX_SDK_SERVER=str(told))
    done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=SECONDS)
    # Some SDKs abort now and then when their process ends; pytest has told all by then.
    assert done.returncode in (0, -signal.SIGABRT), done.stdout[-20_000:] + done.stderr[-5_000:]
    return done.stdout
