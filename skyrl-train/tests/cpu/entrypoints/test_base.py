import asyncio
import gc
import os
import signal

import pytest

from skyrl_train.entrypoints.base import collect_rarely, on_first_interrupt

pytestmark = pytest.mark.usefixtures("without_nohup")


def test_the_garbage_collector_is_as_it_was() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with collect_rarely():
        assert gc.get_threshold()[0] > before[0][0]
        assert gc.get_freeze_count() > before[1]
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


async def send(*numbers: int) -> int:
    """Return how many times these signals stop a run."""
    stops: list[None] = []
    with on_first_interrupt(lambda: stops.append(None)):
        for number in numbers:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0)  # the loop reads the number from its wake-up socket
            await asyncio.sleep(0.01)
    return len(stops)


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT],
        [signal.SIGTERM],
        [signal.SIGHUP],
        [signal.SIGHUP, signal.SIGHUP, signal.SIGHUP],
        [signal.SIGTERM, signal.SIGHUP],
    ],
    ids=lambda numbers: "-".join(number.name for number in numbers),
)
def test_the_first_signal_stops_a_run_and_a_closed_terminal_never_kills_it(numbers: list[int]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert asyncio.run(send(*numbers)) == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(send(signal.SIGHUP, signal.SIGHUP)) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_ends_the_program_at_once() -> None:
    process = os.fork()
    if process == 0:
        asyncio.run(send(signal.SIGINT, signal.SIGINT))
        os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 130
