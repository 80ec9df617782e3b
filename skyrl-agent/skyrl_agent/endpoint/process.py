"""The endpoint in a separate process: HTTP, templates and tokenization do not slow down the trainer's event loop.

trainer → endpoint    start, open, end, serve_others, hold_others
endpoint → trainer    calls to the engine, because the engine stays in the trainer's process
"""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from skyrl_agent.endpoint.server import Endpoint, session_url
from skyrl_agent.endpoint.service import ModelService
from skyrl_agent.endpoint.session import AgentSession
from skyrl_train.inference_engines.base import InferenceEngine, SamplingParams
from skyrl_train.inference_engines.channel import listen, new_local_address
from skyrl_train.inference_engines.process import ServerProcess
from skyrl_train.inference_engines.remote import RemoteClient, RemoteEngine, new_token, serve
from skyrl_train.types import Segment, Turn
from skyrl_train.watchdog import ENDPOINT, Wait

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0

MakeService = Callable[[InferenceEngine], ModelService]
"""Creates an endpoint's `ModelService` from the engine. Must be picklable, e.g. a `partial` of `ModelService`."""


SessionResult = tuple[list[Segment], list[Turn], set[int], float, str | None, Counter[str]]
"""Rows, turns and side rows of the recording, `generate_s`, `engine_failure` and `counts`, for the trainer."""


class EndpointProcess:
    """An `Endpoint` in a separate process. It samples with the engine of this process."""

    def __init__(self, engine: InferenceEngine, make_service: MakeService) -> None:
        """Prepare an endpoint for `make_service(engine)`. Call `start` next."""
        self._make_service = make_service
        self._service = make_service(engine)  # creates the recordings of sessions
        self._engine = engine
        self._client: RemoteClient | None = None
        self._resources = AsyncExitStack()  # closed in reverse order
        self._origin = ""

    @property
    def is_lost(self) -> bool:
        """True if the process has crashed."""
        return self._client is not None and self._client.is_broken

    async def start(self, host: str = "127.0.0.1", port: int = 0, public_url: str | None = None) -> None:
        """Start the process, and call `Endpoint.start` in it.

        Raise ConfigError if the address cannot be used, and EngineError if the process crashes or is not ready in time.
        """
        try:
            address, folder = new_local_address("endpoint")
            if folder is not None:
                self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
            token = new_token()
            listener = self._resources.enter_context(listen(address))
            serving = asyncio.create_task(serve(listener, token, self._engine))
            self._resources.push_async_callback(asyncio.wait, [serving], timeout=CLOSE_TIMEOUT_S)
            self._resources.callback(serving.cancel)
            process = await asyncio.to_thread(ServerProcess, n_threads=1, name="endpoint")
            self._resources.push_async_callback(asyncio.to_thread, process.close)
            make = partial(_EndpointHost, address, token, self._make_service)
            self._client = await asyncio.to_thread(
                RemoteClient, process.address, process.token, make, process.describe_end, process.close
            )
            self._resources.push_async_callback(self._client.close)
            self._origin = await self._call("start", host, port, public_url)
        except BaseException:
            await self.close()
            raise
        logger.info("The endpoint of model %r listens on %s/v1", self._service.model_name, self._origin)

    async def close(self) -> None:
        """Close the endpoint and end its process."""
        await self._resources.aclose()

    def url(self, session: AgentSession | None = None) -> str:
        """Return the `base_url` for clients of a session. Without a session, requests are not recorded."""
        return session_url(self._origin, session)

    async def open_session(self, sampling: SamplingParams, seed: int, name: str = "session") -> AgentSession:
        """Start recording the requests under the session's URL. `end_session` fills in the recording."""
        session_id: str = await self._call("open", sampling, seed, name)
        return AgentSession(session_id, sampling, seed, self._service.new_recording())

    async def end_session(self, session: AgentSession) -> None:
        """Stop recording and fill in `session.recording`. Unfinished and later requests get status 404."""
        result: SessionResult = await self._call("end", session.id)
        recording = session.recording
        recording.rows, recording.turns, recording.side_rows = result[:3]
        session.generate_s, session.engine_failure, session.counts = result[3:]

    async def serve_others(self) -> None:
        """Answer requests without a session again. This is the initial state."""
        await self._call("serve_others")

    async def hold_others(self) -> None:
        """Hold requests without a session until `serve_others`. See `Endpoint.hold_others`."""
        await self._call("hold_others")

    async def _call(self, method: str, *args: Any) -> Any:
        assert self._client is not None, "call start() first"
        with Wait(ENDPOINT, self._origin, method):
            return await self._client.call(method, *args)


class _EndpointHost(Endpoint):
    """The endpoint in the separate process. `EndpointProcess` calls its methods."""

    def __init__(self, address: str, token: bytes, make_service: MakeService) -> None:
        self._engine = RemoteEngine(address, token, None, lambda: "the trainer has ended")
        super().__init__(make_service(self._engine))

    async def open(self, sampling: SamplingParams, seed: int, name: str) -> str:
        return (await self.open_session(sampling, seed, name)).id

    async def end(self, session_id: str) -> SessionResult:
        session = self._sessions[session_id]
        await self.end_session(session)
        recording = session.recording
        rest = session.generate_s, session.engine_failure, session.counts
        return recording.rows, recording.turns, recording.side_rows, *rest

    async def hold_others(self) -> None:
        await super().hold_others()
        await self._engine.check_health()  # calls are answered in order, so the cancelled requests have ended

    async def close(self) -> None:
        await super().close()
        await self._engine.close()
