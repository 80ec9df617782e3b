"""The environments of the SDKs, which `make test-tinker` makes, and what programs in them are told."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / ".venv-tinker"
VERSIONS = tuple(sorted(path.stem for path in (HERE / "requirements").glob("[0-9]*.txt")))
NEWEST = VERSIONS[-1]
"""With this one, there is the cookbook."""


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
