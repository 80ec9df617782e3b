import os
import resource
import sys
from collections.abc import Iterator
from contextlib import closing
from mmap import mmap
from pathlib import Path

import pytest
from gym_kit import probe_worker

from skyrl_gym.worker_pool import Pool, serving

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with closing(Pool("gym_kit.probe_worker", size=1)) as pool:
        yield pool


def ask(pool: Pool, expression: str, limit_s: float = 60.0) -> str:
    value: str = pool.ask([expression, limit_s], limit_s)["value"]
    return value


@pytest.mark.parametrize(
    ("expression", "value"),
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
        (f"bytearray({probe_worker.MEMORY_BYTES})", "MemoryError"),
    ],
)
def test_answer_has_no_access_and_little_memory(pool: Pool, tmp_path: Path, expression: str, value: str) -> None:
    (tmp_path / "secret").write_text("hunter2")
    assert ask(pool, expression.format(parent=os.getpid(), folder=tmp_path)) == value


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the limits of other processes")
def test_kernel_limits_of_a_worker(pool: Pool) -> None:
    ask(pool, "1", 2.0)
    (pid,) = pool.workers().idle_pids()
    assert resource.prlimit(pid, resource.RLIMIT_AS)[0] == probe_worker.MEMORY_BYTES
    assert 3 <= resource.prlimit(pid, resource.RLIMIT_CPU)[0] < 10


def test_worker_is_replaced_after_many_answers_or_if_it_keeps_memory(pool: Pool) -> None:
    pool.close()
    ask(pool, "1")
    (first,) = pool.workers().idle_pids()
    for _ in range(serving.MAX_ANSWERS - 2):
        ask(pool, "1")
    assert pool.workers().idle_pids() == [first]
    ask(pool, "1")
    assert pool.workers().idle_pids() == []
    assert ask(pool, "6 * 7") == "42"
    ask(pool, "1")
    assert len(pool.workers().idle_pids()) == 1
    ask(pool, f"setattr(sys, 'kept', bytearray({probe_worker.RECYCLE_BYTES}))")
    assert pool.workers().idle_pids() == []


def test_address_space_is_measured() -> None:
    with serving.AddressSpace() as address_space:
        before = address_space.n_bytes()
        with mmap(-1, 100 * MEGABYTE):
            assert address_space.n_bytes() >= before + 100 * MEGABYTE
