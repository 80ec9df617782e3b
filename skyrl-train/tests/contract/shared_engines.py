"""Engines that the tests of a backend share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from transformers import PreTrainedModel

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.weight_sync.base import Transport
from tests.contract.engine_kit import sync_weights


class SharedEngines:
    """Engines that tests take turns with, because starting one takes long. One for each set of options."""

    def __init__(self, start: Callable[..., InferenceEngine], model: PreTrainedModel, transport: Transport) -> None:
        self._start = start
        self._model = model
        self._transport = transport
        self._engines: dict[str, InferenceEngine] = {}

    def new(self, **options: Any) -> InferenceEngine:
        """Return an engine with the initial weights, as version 0, and without a cache."""
        key = repr(sorted(options.items()))
        if key not in self._engines:
            self._engines[key] = self._start(**options)
        return self._engines[key]

    async def reset(self) -> None:
        """End what a test has begun, and drop engines that it has closed."""
        for key, engine in list(self._engines.items()):
            try:
                await engine.abort()
                with suppress(EngineError):
                    await engine.resume()
                await engine.wake_up()
                await sync_weights(engine, self._model.named_parameters, 0, self._transport)
            except EngineError:
                del self._engines[key]
                await engine.close()

    async def close(self) -> None:
        """Close all engines."""
        for engine in self._engines.values():
            await engine.close()
