import asyncio
import fcntl
import time

import pytest

from tx.tinker.doorbell import POLL_SEC, Doorbell


def test_many_rings_never_block_and_merge() -> None:
    """Also on large file descriptors, which `select` does not support."""
    ours, other = Doorbell.pair()
    with ours, other, Doorbell.from_fd(fcntl.fcntl(other.fileno(), fcntl.F_DUPFD_CLOEXEC, 1024)) as theirs:
        assert not theirs.wait(0)
        started = time.monotonic()
        for _ in range(100_000):
            ours.ring()
        assert time.monotonic() - started < 20
        while theirs.wait(0):
            pass
        ours.ring()
        assert theirs.wait(0)


def test_a_dead_process_is_noticed() -> None:
    ours, theirs = Doorbell.pair()
    with theirs:
        ours.close()
        assert theirs.wait(60)
        assert theirs.is_hung_up
        theirs.ring()
        started = time.monotonic()
        theirs.wait(60)
        assert time.monotonic() - started < 20


def test_without_a_socket_it_polls() -> None:
    with Doorbell.from_fd(None) as bell:
        bell.ring()
        started = time.monotonic()
        assert bell.wait(60)
        assert POLL_SEC <= time.monotonic() - started < 20
        assert not bell.is_hung_up
        with pytest.raises(ValueError, match="no socket"):
            bell.fileno()


async def test_listening() -> None:
    ours, theirs = Doorbell.pair()
    rung = asyncio.Event()
    with ours, theirs:
        theirs.listen(rung.set)
        for _ in range(3):
            rung.clear()
            ours.ring()
            await asyncio.wait_for(rung.wait(), 20)
        rung.clear()
        ours.close()
        await asyncio.wait_for(rung.wait(), 20)
        assert theirs.is_hung_up
        theirs.stop_listening()
