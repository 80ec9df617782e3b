"""`python -m tx.tinker.engine`: started by the server, or by itself beside a server with `--no-start-engine`."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from tx.tinker.backends.base import Backend
from tx.tinker.config import TxConfig, parse_config
from tx.tinker.database import open_database
from tx.tinker.doorbell import Doorbell
from tx.tinker.engine.loop import Engine


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
    with Doorbell.inherited(fd) as doorbell:
        database = open_database(config.database_url)
        Engine(config, database, new_backend(config), doorbell).run(lambda: is_ending)
        database.dispose()


def new_backend(config: TxConfig) -> Backend:
    """The backend that is asked for; the packages of others need not be there."""
    folder = model_folder(config.base_model)
    if config.backend == "torch":
        from tx.tinker.backends.torch.backend import TorchBackend
        from tx.tinker.backends.torch.config import TorchConfig

        return TorchBackend(folder, config.model_name, TorchConfig(**config.backend_config))
    from tx.tinker.backends.jax.backend import JaxBackend
    from tx.tinker.backends.jax.config import JaxConfig

    return JaxBackend(folder, config.model_name, JaxConfig(**config.backend_config))


def model_folder(name: str) -> Path:
    """The folder of a model: the one that is named, or a download of the Hugging Face repository."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))


if __name__ == "__main__":
    main()
