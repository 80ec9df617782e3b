"""Servers as users start them, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdk.environments import ENVIRONMENTS
from sdk.processes import processes_with

SECONDS = 120
"""For what takes five on a machine that does nothing else."""


@contextmanager
def serving(model: Path, state: Path, *flags: str) -> Iterator[str]:
    """The address of a server of a model; when it has ended, its engine has, too."""
    command = [
        sys.executable,
        "-m",
        "tx.tinker.api",
        f"--base-model={model}",
        f"--checkpoints-base={state}",
        "--port=0",
    ]
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # the tests' own
    variables["XDG_CACHE_HOME"] = str(ENVIRONMENTS / "cache")  # programs compiled for the last run serve in this one
    log = state.with_suffix(".log")
    with log.open("w") as told:
        process = subprocess.Popen([*command, *flags], env=variables, stderr=told, stdin=subprocess.DEVNULL)
    try:
        yield _url(process, log)
    finally:
        process.terminate()
        try:
            process.wait(SECONDS)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGTERM, log.read_text()[-5000:]
    assert not processes_with(str(state))


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Once the engine is up, which alone knows how long a context is."""
    deadline = time.monotonic() + SECONDS
    while True:
        assert process.poll() is None, log.read_text()[-5000:]
        assert time.monotonic() < deadline, log.read_text()[-5000:]
        told = re.search(r"serving \S+ at (\S+),", log.read_text())
        if told and "max_context_length" in _models(told[1])[0]:
            return told[1]
        time.sleep(0.1)


def _models(url: str) -> list[dict[str, object]]:
    with urllib.request.urlopen(f"{url}/api/v1/get_server_capabilities", timeout=10) as reply:
        models: list[dict[str, object]] = json.load(reply)["supported_models"]
        return models
