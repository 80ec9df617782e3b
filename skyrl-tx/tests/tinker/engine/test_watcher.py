"""A separate process is stopped while its main thread computes in C."""

import signal
import subprocess
import textwrap

import pytest
from tx_kit.processes import start_python

PROGRAM = textwrap.dedent("""
    import hashlib
    from tx.tinker.engine import watcher as module
    from tx.tinker.engine.watcher import Watcher

    module.BEAT_SECONDS = 0.1

    def say(word):
        print(word, flush=True)

    with Watcher() as watcher:
        def beat():
            say("beat")
            raise RuntimeError("the database has failed")

        watcher.on_beat = beat
        watcher.on_stop = lambda: say("stop")
        say("ready")
        hashlib.pbkdf2_hmac("sha256", b"", b"", 40_000_000)
        say("computed")
""")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_is_seen_during_a_long_computation(number: signal.Signals) -> None:
    child = start_python("-c", PROGRAM, stdout=subprocess.PIPE, bufsize=1)
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "ready\n"
        for _ in range(2):  # although each of them fails
            assert child.stdout.readline() == "beat\n"
        child.send_signal(number)
        while (word := child.stdout.readline()) == "beat\n":
            pass
        assert word == "stop\n"
        child.kill()
