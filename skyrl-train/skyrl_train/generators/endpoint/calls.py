"""Requests in progress: each can be ended from here, or by its client going away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skyrl_train.generators.endpoint.errors import RequestError
from skyrl_train.generators.endpoint.session import Session

T = TypeVar("T")

Owners = frozenset[Session | None]


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Calls:
    """What is being answered, and to which sessions it belongs; None stands for no session."""

    def __init__(self) -> None:
        self._owners: dict[asyncio.Task[Any], Owners] = {}
        self._reasons: dict[asyncio.Task[Any], RequestError] = {}

    async def run(self, owners: Owners, gone: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when its client goes away: `gone` returns then.

        Raises:
            ClientGone: it has.
            RequestError: the one that `end` was given.
        """
        task = asyncio.create_task(work)
        leaving = asyncio.create_task(gone)
        self._owners[task] = owners
        try:
            await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            raise self._reasons.get(task) or ClientGone
        finally:
            task.cancel()
            leaving.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)
            self._owners.pop(task)
            self._reasons.pop(task, None)

    async def end(self, reason: RequestError, is_meant: Callable[[Owners], bool] = lambda owners: True) -> None:
        """Answer the calls whose owners are meant with `reason`; their work has stopped when this returns."""
        tasks = [task for task, owners in self._owners.items() if is_meant(owners)]
        for task in tasks:
            self._reasons[task] = reason
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
