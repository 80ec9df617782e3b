"""The server: `python -m tx.tinker.api --base-model Qwen/Qwen3-0.6B`.

It serves clients and writes their requests to the database. The engine, a separate process that the server starts and
supervises, computes them.
"""

import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tx.tinker.config import TxConfig, parse_config
from tx.tinker.routes import downloads, futures, monitoring, runs, sampling, sessions, training
from tx.tinker.server.auth import KeyCheck
from tx.tinker.server.body_limit import BodyReader
from tx.tinker.server.cleaner import Cleaner
from tx.tinker.server.replies import add_error_replies
from tx.tinker.server.request_log import RequestLog
from tx.tinker.server.service import Service
from tx.tinker.store.state_lock import StateLock, StateTakenError

logger = logging.getLogger(__name__)

PREFIX = "/api/v1"
SHUTDOWN_SEC = 5


def create_app(config: TxConfig, service: Service | None = None) -> FastAPI:
    """Create the application. The service starts and stops with it."""
    served = service or Service(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with served.running(), Cleaner(served).running():
            yield

    app = FastAPI(title="skyrl-tx", lifespan=lifespan, redirect_slashes=False)
    app.state.service = served
    for module in (sessions, training, sampling, futures, runs, downloads):
        app.include_router(module.router, prefix=PREFIX)
    app.include_router(monitoring.router)
    add_error_replies(app)
    app.add_middleware(BodyReader, max_bytes=config.max_body_bytes)
    app.add_middleware(KeyCheck, config=config)
    app.add_middleware(RequestLog, metrics=served.metrics)
    return app


class Server(uvicorn.Server):
    """A server that releases held polls on shutdown and exits if the engine is unusable."""

    def __init__(self, config: TxConfig, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(config, service),
                host=config.host,
                port=config.port,
                root_path=config.root_path,
                access_log=False,
                log_level="warning",
                timeout_graceful_shutdown=SHUTDOWN_SEC,
            )
        )
        self._service = service

    async def on_tick(self, counter: int) -> bool:
        """Return True to exit. Called ten times per second."""
        return await super().on_tick(counter) or self.is_unusable

    @property
    def is_unusable(self) -> bool:
        """True if the engine cannot serve with these settings."""
        return self._service.supervisor is not None and self._service.supervisor.unusable is not None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and log the addresses."""
        await super().startup(sockets)
        config = self._service.config
        for server in self.servers:
            for bound in server.sockets:
                host, port = bound.getsockname()[:2]
                where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                logger.info("serving %s at %s, state in %s", config.model_name, where, config.checkpoints_base)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Release held polls on a signal, so that shutdown does not wait for them. Kill the engine on the second."""
        if self.should_exit and self._service.supervisor is not None:
            self._service.supervisor.kill()
        super().handle_exit(sig, frame)
        self._service.promises.release()

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        """Stop when the terminal closes. It may send its signal several times."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.handle_exit(signal.SIGTERM, frame)


def main(arguments: Sequence[str] | None = None, program: str = "python -m tx.tinker.api") -> None:
    """Serve until a signal arrives."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s server %(levelname)s %(message)s")
    config = parse_config(arguments, program=program)
    config.checkpoints_base.mkdir(parents=True, exist_ok=True)
    if not config.api_keys and config.host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning("no API keys: anyone who can reach %s port %d can use this server", config.host, config.port)
    with StateLock(config, "server") as lock:
        if config.start_engine:
            try:
                lock.take()
            except StateTakenError as error:
                sys.exit(str(error))
        service = Service(config)
        server = Server(config, service)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, server.handle_hangup)
        server.run()
    if server.is_unusable:
        sys.exit(1)  # the supervisor has logged the reason


if __name__ == "__main__":
    main()
