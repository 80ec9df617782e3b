from __future__ import annotations

import asyncio

import pytest

from skyrl_gym.adapters.openenv_places import Places, places_of


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served() -> None:
    places = Places()
    order: list[int] = []

    async def visit(number: int) -> None:
        await places.take(2)
        order.append(number)
        await asyncio.sleep(0)
        places.give_back(was_playing=False)

    await asyncio.gather(*(visit(number) for number in range(10)))
    assert order == list(range(10))


async def test_a_place_that_is_not_wanted_any_more_goes_to_the_next() -> None:
    places = Places()
    await places.take(1)
    impatient, patient = asyncio.create_task(places.take(1)), asyncio.create_task(places.take(1))
    await settle()
    places.give_back(was_playing=False)  # to the impatient one, who
    impatient.cancel()  # does not know yet
    with pytest.raises(asyncio.CancelledError):
        await impatient
    await asyncio.wait_for(patient, 30)


async def test_whoever_gives_up_does_not_hold_up_the_queue() -> None:
    places = Places()
    await places.take(1)
    impatient, patient = asyncio.create_task(places.take(1)), asyncio.create_task(places.take(1))
    await settle()
    impatient.cancel()
    await settle()
    places.give_back(was_playing=False)
    await asyncio.wait_for(patient, 30)


async def test_a_refusal_sets_the_limit_to_what_was_once_played() -> None:
    places = Places()
    for _ in range(5):
        await places.take(None)
    for _ in range(3):
        places.accepted()
    assert places.refused()
    places.give_back(was_playing=False)
    assert places.refused()
    places.give_back(was_playing=False)
    waiting = asyncio.create_task(places.take(None))
    await settle()
    assert not waiting.done()
    places.give_back(was_playing=True)
    await asyncio.wait_for(waiting, 30)
    assert not places.refused()  # it is no more than there once were: ask again


async def test_one_more_is_tried_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_gym.adapters.openenv_places.PROBE_S", 0.05)
    places = Places()
    await places.take(None)
    places.accepted()
    await places.take(None)
    assert places.refused()
    places.give_back(was_playing=False)
    second, third = asyncio.create_task(places.take(None)), asyncio.create_task(places.take(None))
    await settle()
    assert not second.done()
    await asyncio.wait_for(second, 30)
    await asyncio.sleep(0.2)
    assert not third.done()
    places.accepted()
    await asyncio.wait_for(third, 30)


def test_an_event_loop_that_is_gone_waits_for_nothing() -> None:
    places = Places()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(places.take(1))
    waiting = loop.create_task(places.take(1))
    loop.run_until_complete(settle())
    loop.close()  # and nobody cancels what waits there
    places.give_back(was_playing=False)
    asyncio.run(asyncio.wait_for(places.take(1), 30))
    assert not waiting.done()


def test_everyone_shares_the_places_of_a_server() -> None:
    assert places_of("ws://one/ws") is places_of("ws://one/ws")
    assert places_of("ws://one/ws") is not places_of("ws://two/ws")
