import asyncio

import pytest

from skyrl_gym.adapters.openenv.slots import SessionSlots


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served() -> None:
    slots = SessionSlots()
    order: list[int] = []

    async def visit(number: int) -> None:
        await slots.acquire(2)
        order.append(number)
        await asyncio.sleep(0)
        slots.release(was_playing=False)

    await asyncio.gather(*(visit(number) for number in range(10)))
    assert order == list(range(10))


async def test_refusal_limits_sessions_to_the_previous_maximum() -> None:
    slots = SessionSlots()
    for _ in range(5):
        await slots.acquire(None)
    for _ in range(3):
        slots.record_accepted()
    assert slots.record_refused()
    slots.release(was_playing=False)
    assert slots.record_refused()
    slots.release(was_playing=False)
    waiting = asyncio.create_task(slots.acquire(None))
    await settle()
    assert not waiting.done()
    slots.release(was_playing=True)
    await asyncio.wait_for(waiting, 30)
    assert not slots.record_refused()  # not more than the maximum so far, so retry


async def test_one_more_session_is_tried_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SessionSlots()
    await slots.acquire(None)
    slots.record_accepted()
    await slots.acquire(None)
    assert slots.record_refused()
    slots.release(was_playing=False)
    early = asyncio.create_task(slots.acquire(None))
    await settle()
    assert not early.done()
    early.cancel()
    monkeypatch.setattr("skyrl_gym.adapters.openenv.slots.PROBE_S", 0.05)
    slots.record_refused()
    second, third = asyncio.create_task(slots.acquire(None)), asyncio.create_task(slots.acquire(None))
    await asyncio.wait_for(second, 30)
    await asyncio.sleep(0.2)
    assert not third.done()
    slots.record_accepted()
    await asyncio.wait_for(third, 30)


def test_closed_event_loop_is_skipped() -> None:
    slots = SessionSlots()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(slots.acquire(1))
    waiting = loop.create_task(slots.acquire(1))
    loop.run_until_complete(settle())
    loop.close()  # without cancelling the tasks that wait in it
    slots.release(was_playing=False)
    asyncio.run(asyncio.wait_for(slots.acquire(1), 30))
    assert not waiting.done()
