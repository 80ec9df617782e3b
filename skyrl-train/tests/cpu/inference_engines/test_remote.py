import asyncio
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from train_kit.engines import LIMITS, Listener, assert_same, make_engine, start
from train_kit.processes import no_leaks, python
from train_kit.weight_sync import SYNC_TIMEOUT_S, sync_weights
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError, EngineError, EngineLostError
from skyrl_train.inference_engines import channel, remote
from skyrl_train.inference_engines.base import EngineRequest, InferenceEngine, SamplingParams
from skyrl_train.inference_engines.channel import Channel, listen, new_local_address
from skyrl_train.inference_engines.hf import load_engine
from skyrl_train.inference_engines.process import ServerProcess, start_engine
from skyrl_train.inference_engines.remote import TOKEN_BYTES, RemoteEngine, new_token, serve
from skyrl_train.weight_sync import SyncPlan

MakeEngine = Callable[[], InferenceEngine]
NewEngine = Callable[..., RemoteEngine]


@pytest.fixture(scope="module", autouse=True)
def temporary_folder() -> Iterator[Path]:
    """A private folder for temporary files, so that files of concurrent tests do not count as leaks."""
    with tempfile.TemporaryDirectory(prefix="skyrl-") as folder, pytest.MonkeyPatch.context() as patches:
        patches.setenv("TMPDIR", folder)
        patches.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def engine_process(temporary_folder: Path, forked_processes: None) -> Iterator[ServerProcess]:
    """An engine process shared by the tests of this module. Each connection creates a new engine."""
    process = ServerProcess(n_threads=1)
    yield process
    process.close()


@pytest.fixture
async def new_engine(engine_process: ServerProcess, tiny_model_path: Path) -> AsyncIterator[NewEngine]:
    """Create engines of the tiny model in the shared process and close them after the test."""
    engines: list[RemoteEngine] = []

    def new(**options: Any) -> RemoteEngine:
        engines.append(engine_process.connect(make_engine(tiny_model_path, **options)))
        return engines[-1]

    yield new
    for engine in engines:
        await engine.close()


@dataclass(frozen=True)
class EngineServer:
    """A TCP address of this process that serves engines."""

    address: str
    token: bytes

    async def connect(self, make_engine: MakeEngine) -> RemoteEngine:
        def describe_end() -> str:
            return "this process closed the connection"

        return await asyncio.to_thread(
            RemoteEngine, self.address, self.token, make_engine, describe_end, start_timeout_s=30.0
        )

    def open(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=5)


@asynccontextmanager
async def served(max_frame_bytes: int = 1 << 20) -> AsyncIterator[EngineServer]:
    """Serve engines from the running event loop."""
    token = new_token()
    with listen("127.0.0.1:0") as listener, pytest.MonkeyPatch.context() as patches:
        patches.setattr(remote, "TOKEN_TIMEOUT_S", 0.3)
        patches.setattr(channel, "MAX_FRAME_BYTES", max_frame_bytes)
        task = asyncio.create_task(serve(listener, token))
        yield EngineServer(f"127.0.0.1:{listener.getsockname()[1]}", token)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


def request(n_new: int, seed: int = 0, n_prompt: int = 10, **sampling: Any) -> EngineRequest:
    return EngineRequest(list(range(5, 5 + n_prompt)), SamplingParams(n_new, ignore_eos=True, **sampling), seed)


# -- crashes


async def test_calls_to_a_killed_process_fail_at_once_and_another_engine_samples_the_same_tokens(
    new_engine: NewEngine, tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path, temporary_folder: Path
) -> None:
    other_engine, pid_file = new_engine(), tmp_path / "pid"
    await sync_weights(other_engine, tiny_model.named_parameters, 0, "gloo")  # its store keeps a pipe open
    async with no_leaks(temporary_folder):
        process = await asyncio.to_thread(ServerProcess, n_threads=1)
        make = make_engine(tiny_model_path, pid_file, max_num_seqs=3)
        engine, long = await asyncio.to_thread(process.connect, make, is_owner=True), request(400)
        listener = Listener(engine, long)
        calls = [start(engine, request(400, seed=1), method) for method in ("generate", "generate", "stream", "stream")]
        await listener.wait_for(20)
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGSTOP)  # so the next call is also waiting
        sync = asyncio.create_task(sync_weights(engine, tiny_model.named_parameters, 1, "gloo"))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(SYNC_TIMEOUT_S / 2):
            outcomes: list[Any] = await asyncio.gather(listener.task, *calls, sync, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineLostError] * 6
        ended = f"engine process {process.pid} ended with exit status -9"
        assert all(ended in str(outcome) for outcome in outcomes)
        for call in (engine.generate([long]), engine.pause(), Listener(engine, long).result()):
            with pytest.raises(EngineError, match=ended):
                await call
        received = listener.token_ids
        await engine.close()
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.generate([long])
    (result,) = await other_engine.generate([long])
    assert 20 <= len(received) < 400
    assert result.token_ids[: len(received)] == received


@pytest.mark.parametrize("kills_both", [False, True], ids=["driver", "both"])
async def test_a_process_ends_when_its_parent_is_killed(
    kills_both: bool, tmp_path: Path, temporary_folder: Path
) -> None:
    folders = set(temporary_folder.iterdir())
    code = (
        "import time; from skyrl_train.inference_engines.process import ServerProcess\n"
        "if __name__ == '__main__': print(ServerProcess().pid, flush=True); time.sleep(60)"
    )
    script = tmp_path / "driver.py"
    script.write_text(code, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = await asyncio.create_subprocess_exec(python(), script, env=env, stdout=asyncio.subprocess.PIPE)
    process = psutil.Process(int(await driver.stdout.readline()))
    if kills_both:
        process.kill()
    driver.kill()
    await driver.wait()
    with suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(process.wait, 20)
    assert set(temporary_folder.iterdir()) == folders


# -- start and end


@pytest.fixture
async def without_leaks(temporary_folder: Path, forked_processes: None) -> AsyncIterator[None]:
    async with no_leaks(temporary_folder):
        yield


@pytest.mark.usefixtures("without_leaks")
async def test_a_started_engine_ends_without_leaks(tiny_model_path: Path) -> None:
    engine = await start_engine(make_engine(tiny_model_path), n_threads=1)
    assert len((await engine.generate([request(5)]))[0].token_ids) == 5
    listener = Listener(engine, request(400))
    await listener.wait_for(2)
    await asyncio.gather(engine.close(), engine.close())
    with pytest.raises(EngineError, match="closed while requests were waiting"):
        await listener.result()


@pytest.mark.usefixtures("without_leaks")
async def test_failed_and_cancelled_starts_leak_nothing() -> None:
    with pytest.raises(ValueError, match="could not convert string to float: 'no model'"):
        await start_engine(partial(float, "no model"))  # type: ignore[arg-type]
    starting = asyncio.create_task(start_engine(partial(time.sleep, 60)))  # type: ignore[arg-type]
    await asyncio.sleep(0.2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_an_engine_that_cannot_start_leaves_its_process_usable(
    engine_process: ServerProcess, new_engine: NewEngine, tiny_model_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot load the model"):
        engine_process.connect(partial(load_engine, str(tiny_model_path), dtype=torch.int8, **LIMITS))
    with pytest.raises(ConfigError, match=r"cannot load the model from .*/nowhere"):
        engine_process.connect(make_engine(Path("/nowhere")))
    with pytest.raises(TypeError, match="surprise"):
        new_engine(surprise=1)
    assert len((await new_engine().generate([request(5)]))[0].token_ids) == 5


async def test_an_engine_that_exceeds_its_start_timeout_is_an_error(engine_process: ServerProcess) -> None:
    with pytest.raises(EngineError, match=r"not ready in 0\.2 s; raise generator\.engine_start_timeout_seconds$"):
        engine_process.connect(partial(time.sleep, 1), start_timeout_s=0.2)  # type: ignore[arg-type]


# -- messages


async def test_chunks_of_all_streams_share_frames(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    n_frames, receive = 0, Channel.receive

    async def counting_receive(channel: Channel) -> Any:
        nonlocal n_frames
        n_frames += 1
        return await receive(channel)

    engine = new_engine()
    monkeypatch.setattr(Channel, "receive", counting_receive)
    listeners = [Listener(engine, request(30, seed=seed)) for seed in range(8)]
    for listener in listeners:
        await listener.result()
    assert sum(len(listener.chunks) for listener in listeners) == 240
    assert n_frames < 45  # one per step (30), and a few more if the first steps had fewer sequences


@pytest.mark.parametrize("is_delivered", [False, True])
async def test_a_pause_is_undone_if_its_caller_is_cancelled(
    new_engine: NewEngine, is_delivered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    await engine.generate([request(1)])
    deliver = engine._deliver

    def deliver_and_cancel(number: int, kind: str, value: Any) -> None:
        deliver(number, kind, value)
        pausing.cancel()

    if is_delivered:
        monkeypatch.setattr(engine, "_deliver", deliver_and_cancel)
    pausing = asyncio.create_task(engine.pause())
    if not is_delivered:
        for _ in range(5):
            await asyncio.sleep(0)  # send the request
        time.sleep(0.3)  # the engine pauses, and this event loop has not read the reply
        pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    monkeypatch.undo()
    async with asyncio.timeout(10):
        await engine.generate([request(1)])


async def test_weights_cannot_be_shared_with_another_process(new_engine: NewEngine) -> None:
    with pytest.raises(EngineError, match="use transport=auto"):
        await new_engine().receive_weights(SyncPlan(1, "shared", "sync-1"))


async def test_a_message_that_is_too_large_or_cannot_be_pickled_fails_only_its_own_call(tiny_model_path: Path) -> None:
    async with served(max_frame_bytes=4000) as server:
        engine = await server.connect(make_engine(tiny_model_path))
        (expected,) = await engine.generate([request(40)])
        kept = [start(engine, request(40), method) for method in ("generate", "stream")]
        with pytest.raises(EngineError, match=r"a message of [\d,]+ bytes exceeds the limit of 4,000"):
            await engine.generate([request(1, n_prompt=300), *[request(1) for _ in range(200)]])  # as a request
        with pytest.raises(EngineError, match=r"a message of [\d,]+ bytes exceeds the limit of 4,000"):
            await engine.generate([request(200, n_top_logprobs=2)])  # as a result
        with pytest.raises(EngineError, match="cannot be pickled"):
            await engine.end_session(lambda: None)  # type: ignore[arg-type]
        for task in kept:
            assert_same(await task, expected, 1e-5)
        results = await asyncio.gather(*(engine.generate([request(40)]) for _ in range(20)))  # in several frames
        assert [result.token_ids for (result,) in results] == [expected.token_ids] * 20
        await engine.close()


# -- unauthenticated connections


class Payload:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("has_right_token", [False, True])
async def test_a_message_with_a_wrong_token_is_never_unpickled(
    has_right_token: bool, tmp_path: Path, tiny_model_path: Path
) -> None:
    payload = pickle.dumps([(0, "start", Payload(tmp_path / "read"))])
    async with served() as server:
        engine = await server.connect(make_engine(tiny_model_path))
        token = server.token if has_right_token else bytes(TOKEN_BYTES)
        with server.open() as connection:
            connection.sendall(token + struct.pack(">Q", len(payload)) + payload)
            if has_right_token:
                await engine.close()  # the next connection is served
            with suppress(ConnectionResetError):
                await asyncio.to_thread(connection.recv, 1)
        assert (tmp_path / "read").exists() == has_right_token
        if not has_right_token:
            assert len((await engine.generate([request(5)]))[0].token_ids) == 5
            await engine.close()


async def test_a_connection_without_a_token_or_with_an_oversized_frame_is_closed(tiny_model_path: Path) -> None:
    async with served() as server:
        with server.open() as connection:
            assert await asyncio.to_thread(connection.recv, 1) == b""
        with pytest.raises(EngineError, match="this process closed the connection before the engine was ready"):
            await replace(server, token=new_token()).connect(make_engine(tiny_model_path))
        with server.open() as client:
            client.sendall(server.token + struct.pack(">Q", 1 << 60))
            reply = await asyncio.to_thread(client.recv, 1 << 16)
        ((_, kind, error),) = pickle.loads(reply[8:])
        assert kind == "error"
        assert "exceeds the limit" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no sockets without a file")
def test_a_killed_driver_and_its_engine_leave_no_file() -> None:
    address, folder = new_local_address("engine")
    with listen(address):
        assert (address[0], folder) == ("\0", None)
