import time
from pathlib import Path

TIMEOUT_S = 60.0


def assert_logged(folder: Path, *words: bytes) -> None:
    """Assert that the only run in a folder has logged all words. Another process, of wandb, writes the log."""
    (log,) = folder.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + TIMEOUT_S
    while (missing := [word for word in words if word not in log.read_bytes()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not missing
