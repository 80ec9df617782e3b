import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("text", ["10m", "0", "-1", ""])
def test_a_timeout_that_is_no_number_of_seconds_is_named(text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import skyrl_train.launch.timeouts"],
        env={**os.environ, "SKYRL_WORKER_NCCL_TIMEOUT_IN_S": text},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        f"ConfigError: SKYRL_WORKER_NCCL_TIMEOUT_IN_S={text} must be a whole number of seconds above 0" in done.stderr
    )
