import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from fastapi.responses import JSONResponse
from train_kit.engines import EngineKit, Listener, assert_agrees, distance
from train_kit.own_logprobs_contract import OwnLogprobsContract
from train_kit.processes import wait_until
from train_kit.runs import read_lines
from train_kit.sglang_cpu import N_RESERVED_TOKENS
from train_kit.sglang_server import SGLangServer
from train_kit.vision_models import picture
from train_kit.weight_sync import AdapterSource, TensorSource, add_random_adapter, change_adapter
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import read_image
from skyrl_train.config import load_config
from skyrl_train.entrypoints import engine as entrypoint
from skyrl_train.entrypoints.main_base import main
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines import http
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.inference_engines.sglang.engine import SGLangEngine
from skyrl_train.media.spans import ImageSpan
from skyrl_train.weight_sync import SyncOptions, WeightSync

StartServer = Callable[..., SGLangServer]
UPDATE = "/update_weights_from_disk"


@pytest.fixture
def start_server(tiny_model_path: Path) -> Iterator[StartServer]:
    """Start servers, and end them after the test."""
    servers = []

    def start(**options: Any) -> SGLangServer:
        servers.append(SGLangServer(tiny_model_path, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
async def engine_kit(
    start_server: StartServer,
    tiny_model: PreTrainedModel,
    tiny_model_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> AsyncIterator[EngineKit]:
    """Engines with one server each."""
    engines = []

    def new(start: StartServer = start_server, **options: Any) -> SGLangEngine:
        address = start(**options).address
        engines.append(SGLangEngine(address, str(tiny_model_path), tiny_tokenizer, tmp_path / "weights"))
        return engines[-1]

    limits = {"tolerance": 1e-5, "cache_block_size": 1, "n_reserved_tokens": N_RESERVED_TOKENS}
    yield EngineKit(new, copy.deepcopy(tiny_model), tiny_tokenizer, **limits)
    for engine in engines:
        await engine.close()
    assert not list((tmp_path / "weights").glob("*")), "new weights are deleted once the server has them"


class TestSGLangContract(OwnLogprobsContract):
    """The contract, with the stand-in."""

    @pytest.mark.nightly  # the stand-in samples as the embedded engine does
    async def test_tokens_follow_the_distribution_of_the_model(self, engine_kit: EngineKit) -> None:
        await super().test_tokens_follow_the_distribution_of_the_model(engine_kit)


async def test_images_are_refused(engine_kit: EngineKit) -> None:
    engine = engine_kit.new()
    assert not engine.info.reads_images
    request = replace(engine_kit.request(5), images=(ImageSpan(0, 1, read_image(picture(0))),))
    with pytest.raises(EngineError, match=r"has images, but SGLang 0\.5\.23 keeps image features.*backend=hf or vllm"):
        await engine.generate([request])


async def test_a_request_that_cannot_be_written_fails(engine_kit: EngineKit, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_kit.new()

    def fail(*_: object) -> NoReturn:
        raise InvalidAnswer("the image is gone")

    with monkeypatch.context() as patches:
        patches.setattr(engine, "_body", fail)
        with pytest.raises(EngineError, match=r"^cannot send the request: .*the image is gone"):
            await asyncio.wait_for(engine.generate([engine_kit.request(5)]), 30)
    assert (await engine.generate([engine_kit.request(5)]))[0].token_ids


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_events_with_all_tokens_or_only_new_ones(is_incremental: bool, engine_kit: EngineKit) -> None:
    request = engine_kit.request(10, 20, ignore_eos=True)
    listener = Listener(engine_kit.new(is_incremental=is_incremental), request)
    result = await listener.result()
    assert listener.n_tokens == len(result.token_ids) == 20
    assert_agrees(engine_kit, request, result)


async def test_dropped_requests_are_aborted_before_new_weights_are_loaded(
    engine_kit: EngineKit, start_server: StartServer
) -> None:
    server = start_server()
    engine = engine_kit.new(start=lambda: server)
    listeners = [Listener(engine, engine_kit.request(n, 300, ignore_eos=True)) for n in (10, 11)]
    for listener in listeners:
        await listener.wait_for(2)
    await engine.pause()
    await engine_kit.sync(engine, 1)
    paths = [path for path, _ in server.calls]
    assert sorted(paths[:2]) == ["/abort_request"] * 2
    assert paths[2:] == [UPDATE, "/flush_cache"]
    assert not any(body.get("flush_cache", True) for path, body in server.calls if path == UPDATE)
    await engine.abort()


async def test_a_health_check_does_not_use_released_memory(engine_kit: EngineKit) -> None:
    engine = engine_kit.new()
    await engine.sleep()
    await engine.check_health()


async def test_a_server_that_dies_fails_its_requests(
    engine_kit: EngineKit, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEALTH_INTERVAL_S", 0.1)
    server = start_server()
    engine = engine_kit.new(start=lambda: server)
    listener = Listener(engine, engine_kit.request(10, 400, ignore_eos=True))
    await listener.wait_for(3)
    await asyncio.to_thread(server.close)
    with pytest.raises(EngineError, match=r"broke off a response|does not answer /server_info|ended a response early"):
        await listener.result()
    with pytest.raises(EngineError, match="broke off a response"):
        await engine.generate([engine_kit.request(10, 4)])
    with pytest.raises(EngineError, match="does not answer"):
        await engine_kit.sync(engine, 1)


async def test_weights_that_the_server_rejects(engine_kit: EngineKit) -> None:
    engine = engine_kit.new()
    engine_kit.model.model.norm = torch.nn.Identity()
    with pytest.raises(EngineError, match=r"update_weights_from_disk answered with HTTP 400: .*model.norm.weight"):
        await engine_kit.sync(engine, 1)


async def test_the_server_gets_whole_weights_though_only_an_adapter_or_changes_are_sent(engine_kit: EngineKit) -> None:
    engine, model, options = engine_kit.new(), engine_kit.model, SyncOptions("auto", timeout_s=20, sends_changes=True)
    sync = WeightSync(TensorSource(model.named_parameters), {"the engine": engine}, options)
    for version in range(2):
        model.lm_head.weight.detach()[version::10] += 0.5
        changes = (await sync(version)).numbers()
        assert await distance(engine, engine_kit) < engine_kit.tolerance
    add_random_adapter(model, rank=2)
    sync = WeightSync(AdapterSource(model), {"the engine": engine}, SyncOptions("auto", timeout_s=20), kind="factors")
    for version in range(2, 4):
        change_adapter(model, version)
        assert await distance(engine, engine_kit) > 1e-2
        factors = (await sync(version)).numbers()
        assert await distance(engine, engine_kit) < 1e-4
    whole = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    assert max(changes["sync/megabytes"], factors["sync/megabytes"]) < 0.2 * whole


async def test_engines_share_a_folder_for_new_weights(engine_kit: EngineKit, start_server: StartServer) -> None:
    servers = [start_server(), start_server()]
    engines = [engine_kit.new(start=lambda server=server: server) for server in servers]
    engine_kit.add_noise()
    await engine_kit.sync(EngineClient(engines), 1)
    folders = [body["model_path"] for server in servers for path, body in server.calls if path == UPDATE]
    assert len(set(folders)) == len(servers), "the first engine deletes the files that the second one loads"
    for engine in engines:
        request = engine_kit.request(10, 20)
        assert_agrees(engine_kit, request, (await engine.generate([request]))[0])


class SlowServer(SGLangServer):
    """A server that takes half a second to load weights."""

    async def _update_weights_from_disk(self, body: dict[str, Any]) -> JSONResponse:
        await asyncio.sleep(0.5)
        return await super()._update_weights_from_disk(body)


async def test_loading_weights_has_a_configured_timeout(engine_kit: EngineKit, tiny_model_path: Path) -> None:
    server = SlowServer(tiny_model_path)
    engine = engine_kit.new(lambda: server)
    source = TensorSource(engine_kit.model.named_parameters)
    await WeightSync(source, {"the engine": engine}, SyncOptions(timeout_s=60))(1)
    message = r"It had 0\.2 s to load new weights; raise generator\.weight_sync_timeout_seconds"
    with pytest.raises(EngineError, match=message):
        await WeightSync(source, {"the engine": engine}, SyncOptions(timeout_s=0.2))(2)
    server.close()


def test_a_run_trains_with_two_servers_and_waits_for_a_restarted_one(
    start_server: StartServer,
    catch_run: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entrypoint, "RECONNECT_INTERVAL_S", 0.1)
    first, second = servers = [start_server(), start_server()]
    log = tmp_path / "skyrl/test_run/metrics.jsonl"
    leftover = log.with_name("engine_weights") / "version_1_of_a_killed_run"
    leftover.mkdir(parents=True)

    def restart() -> None:
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 2)
        first.close()
        time.sleep(0.3)
        servers.append(start_server(port=int(first.address.rpartition(":")[2])))

    restarting = threading.Thread(target=restart, daemon=True)
    restarting.start()
    urls = f"generator.remote_inference_engine_urls=[{first.address},{second.address}]"
    several = ["generator.run_engines_locally=false", urls, "generator.num_inference_engines=2"]
    main([*catch_run, "generator.backend=sglang", *several, "trainer.policy.optimizer_config.lr=0.001"])
    restarting.join(timeout=10)
    rows = read_lines(log)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert max(row["policy/rollout_train_logprobs_abs_diff_max"] for row in rows[1:]) < 1e-4
    assert "Engine 1 of 2 was lost and is replaced" in caplog.text
    versions = [[body["weight_version"] for path, body in server.calls if path == UPDATE] for server in servers]
    assert versions == [["0", "1"], ["0", "1", "2"], ["1", "2"]]
    assert not leftover.parent.exists()


async def test_the_return_of_a_lost_server_has_a_configured_timeout(
    start_server: StartServer,
    tiny_model_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entrypoint, "RECONNECT_INTERVAL_S", 0.1)
    server = start_server()
    generator = {
        "backend": "sglang",
        "run_engines_locally": False,
        "remote_inference_engine_urls": [server.address],
        "engine_start_timeout_seconds": 0.3,
    }
    trainer = {"output_dir": str(tmp_path), "policy": {"model": {"path": str(tiny_model_path)}}}
    cfg = load_config({"trainer": trainer, "generator": generator})
    engine = entrypoint.new_engine(cfg, None, tiny_tokenizer, 0, None)
    server.close()
    message = r"did not return in 0\.3 s; raise generator\.engine_start_timeout_seconds"
    with pytest.raises(EngineError, match=message):
        await engine.generate([EngineRequest([5, 6, 7], SamplingParams(4), seed=0)])
    await engine.close()


def test_a_missing_server_and_one_of_another_kind_are_errors(
    tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"no server answers at http://127.0.0.1:1/server_info: .*start it"):
        SGLangEngine("127.0.0.1:1", str(tiny_model_path), tiny_tokenizer, tmp_path)
    (tmp_path / "server_info").write_text("{}")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(EngineError, match=r"is not an SGLang 0\.5\.23 server: .* no max_req_input_len"):
            SGLangEngine(f"127.0.0.1:{server.server_port}", str(tiny_model_path), tiny_tokenizer, tmp_path)
        server.shutdown()
