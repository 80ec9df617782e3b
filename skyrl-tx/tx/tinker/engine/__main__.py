"""`python -m tx.tinker.engine`: started by the server, or by itself beside a server with `--no-start-engine`."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

from tx.models.config import ModelError
from tx.tinker.backends.factory import model_folder, new_backend
from tx.tinker.config import parse_config
from tx.tinker.database import open_database
from tx.tinker.doorbell import UNUSABLE, Doorbell
from tx.tinker.engine.base_weights import check_weights
from tx.tinker.engine.loop import Engine
from tx.tinker.state_lock import StateLock, StateTakenError

logger = logging.getLogger(__name__)

PATIENCE_SEC = 300.0
"""For the engine of a server that was killed, which ends after the step that it is at."""
LOOK_SEC = 0.2


def main() -> None:
    """Serve until the server ends or a signal comes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # it tells which devices are not there
    fd = None
    arguments = sys.argv[1:]
    if arguments[:1] == ["--doorbell-fd"]:
        fd, arguments = int(arguments[1]), arguments[2:]
    config = parse_config(arguments, program="python -m tx.tinker.engine")
    is_ending = False

    def end(_: int, __: FrameType | None) -> None:
        nonlocal is_ending
        is_ending = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with Doorbell.inherited(fd) as doorbell, StateLock(config, "engine") as lock:

        def is_over() -> bool:
            doorbell.wait(LOOK_SEC)
            return is_ending or doorbell.is_hung_up

        try:
            lock.wait(PATIENCE_SEC, is_over)
        except StateTakenError as error:
            sys.exit(str(error))
        database = open_database(config.database_url)
        try:
            folder = model_folder(config.base_model)
            check_weights(database, config.model_name, folder)
            backend = new_backend(config.backend, folder, config.backend_config, config.model_name)
        except Exception as error:
            told = str(error)
            if not isinstance(error, ModelError):
                logger.exception("%s cannot be loaded", config.base_model)
                told = f"{config.base_model} cannot be loaded: {error!r}"
            sys.stderr.write(f"{' '.join(told.split())}\n")
            sys.exit(UNUSABLE)
        Engine(config, database, backend, doorbell).run(lambda: is_ending or not lock.is_held())
        database.dispose()


if __name__ == "__main__":
    main()
