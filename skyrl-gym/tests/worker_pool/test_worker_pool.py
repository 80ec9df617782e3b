from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from worker_processes import wait_until, workers

from skyrl_gym.worker_pool import Pool


def test_close_ends_a_worker_that_is_still_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_start.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    pool = Pool("slow_to_start", size=1)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(pool.ask, ["?"], 60.0)
        wait_until(lambda: workers("slow_to_start"))
        started = time.monotonic()
        pool.close()
        assert workers("slow_to_start") == set()
        with pytest.raises(RuntimeError, match="workers of slow_to_start were closed during a question"):
            answer.result(timeout=60)
        assert time.monotonic() - started < 60
