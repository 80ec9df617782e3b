from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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


PROBE = """
import os, socket, subprocess, sys
from skyrl_gym.worker_pool.serving import serve

def answer(question):
    try:
        return {"value": repr(eval(question[0]))}
    except OSError as error:
        return {"value": type(error).__name__}

serve(int(sys.argv[1]), answer, memory_bytes=1 << 30, recycle_bytes=1 << 30, readable=[*sys.path, sys.argv[0]])
"""


@pytest.mark.parametrize(
    ("attempt", "value"),
    [
        ("socket.socket()", "PermissionError"),
        ("os.kill({parent}, 0)", "PermissionError"),
        ("__import__('resource').prlimit({parent}, 0)", "PermissionError"),
        ("open('/proc/{parent}/environ')", "PermissionError"),
        ("open('/proc/{parent}/mem', 'r+b')", "PermissionError"),
        ("open('{folder}/new', 'w')", "PermissionError"),
        ("open('{folder}/secret').read()", "PermissionError"),
        ("os.chmod('{folder}/secret', 0o777)", "PermissionError"),
        ("open(sys.argv[0]).close()", "None"),
        ("open('/dev/null', 'w').close()", "None"),
    ],
)
def test_answer_reaches_no_other_process_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str, value: str
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    folder.mkdir()
    (folder / "secret").write_text("hunter2")
    with closing(Pool("probe", size=1)) as pool:
        question = attempt.format(parent=os.getpid(), folder=folder)
        assert pool.ask([question, 10.0], 10.0)["value"] == value
