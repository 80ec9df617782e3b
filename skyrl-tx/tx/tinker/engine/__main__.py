"""`python -m tx.tinker.engine`: started by the server, or separately, next to a server with `--no-start-engine`."""

import faulthandler
import logging
import sys
from functools import partial

from tx.models.config import ModelError
from tx.tinker.backends.factory import model_folder, new_backend
from tx.tinker.config import parse_config
from tx.tinker.doorbell import UNUSABLE, Doorbell
from tx.tinker.engine.base_weights import check_weights
from tx.tinker.engine.loop import Engine, report_alive
from tx.tinker.engine.watcher import Watcher
from tx.tinker.store.database import open_database
from tx.tinker.store.state_lock import StateLock, StateTakenError

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_SEC = 300.0
"""Time for a killed server's engine to exit. It exits after its current step."""
POLL_TIMEOUT_SEC = 0.2


def main() -> None:
    """Serve until the server exits or a signal arrives."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # it reports missing devices
    fd = None
    arguments = sys.argv[1:]
    if arguments[:1] == ["--doorbell-fd"]:
        fd, arguments = int(arguments[1]), arguments[2:]
    config = parse_config(arguments, program="python -m tx.tinker.engine")
    faulthandler.enable()  # a hung engine is aborted and shows where it hangs
    with Doorbell.from_fd(fd) as doorbell, StateLock(config, "engine") as lock, Watcher() as watcher:

        def is_over() -> bool:
            doorbell.wait(POLL_TIMEOUT_SEC)
            return watcher.is_stop_requested or doorbell.is_hung_up

        try:
            lock.wait(LOCK_TIMEOUT_SEC, is_over)
        except StateTakenError as error:
            sys.exit(str(error))
        database = open_database(config.database_url)
        watcher.on_beat = partial(report_alive, database, config.model_name, status={})
        try:
            folder = model_folder(config.base_model)
            check_weights(database, config.model_name, folder)
            backend = new_backend(config.backend, folder, config.backend_config, config.model_name)
        except Exception as error:
            message = str(error)
            if not isinstance(error, ModelError):
                logger.exception("failed to load %s", config.base_model)
                message = f"failed to load {config.base_model}: {error!r}"
            sys.stderr.write(f"{' '.join(message.split())}\n")
            sys.exit(UNUSABLE)
        engine = Engine(config, database, backend, doorbell)
        watcher.on_beat, watcher.on_stop = engine.beat, engine.prepare_stop
        engine.run(lambda: watcher.is_stop_requested or not lock.is_held())
        engine.close()
        watcher.on_beat = watcher.on_stop = lambda: None
        database.dispose()


if __name__ == "__main__":
    main()
