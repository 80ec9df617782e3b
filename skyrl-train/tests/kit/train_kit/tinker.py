"""A Tinker server for runs that train through it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tx_kit.servers import API_KEY, Running, serving

from train_kit.processes import wait_until
from tx.tinker.backends.factory import new_backend
from tx.tinker.db_models import EngineState
from tx.tinker.doorbell import Doorbell
from tx.tinker.engine.loop import Engine


@contextmanager
def serving_tinker(folder: Path, model: Path) -> Iterator[Running]:
    """Run a server and its engine, which trains `model` with PyTorch, in threads; point the SDK's variables at it."""
    end = threading.Event()
    with (
        serving(folder, engine=False, base_model=str(model), backend="torch") as running,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("TINKER_BASE_URL", running.url)
        environment.setenv("TINKER_API_KEY", API_KEY)
        engine = Engine(
            running.config, running.service.database, new_backend("torch", model, {}, str(model)), Doorbell()
        )
        thread = threading.Thread(target=engine.run, args=(end.is_set,))
        thread.start()
        try:
            wait_until(lambda: running.change(lambda db: db.get(EngineState, 1)))
            yield running
        finally:
            end.set()
            thread.join()
            engine.close()
