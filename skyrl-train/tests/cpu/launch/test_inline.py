import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from socket import AF_INET

import psutil
import pytest
import torch
import torch.multiprocessing as mp
from train_kit.runs import run_of
from train_kit.sysfs import MAX_CORE, imitate_gpus, write_sysfs
from transformers import PreTrainedModel

from skyrl_train.config.cli import parse_cli
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.errors import SyncError
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.inference_engines.hf import load_engine
from skyrl_train.inference_engines.process import ServerProcess
from skyrl_train.launch.inline import InlineLauncher
from skyrl_train.weight_sync import Receipt, SyncPlan, rendezvous

pytestmark = pytest.mark.usefixtures("forked_processes")

SERVER = [
    "generator.backend=vllm",
    "generator.run_engines_locally=false",
    "generator.remote_inference_engine_urls=[127.0.0.1:1]",
    "trainer.policy.optimizer_config.lr=0.01",
]


class SilentClient(EngineClient):
    """A client that receives no weights."""

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        await asyncio.Event().wait()
        raise AssertionError("nothing ends the wait")


class Served(RLExperiment):
    """A run in whose place of a vLLM server, an embedded engine in another process receives the weights."""

    client: type[EngineClient] = EngineClient

    def get_engine(self, model: PreTrainedModel | None) -> EngineClient:
        make_engine = partial(
            load_engine,
            self.cfg.trainer.policy.model.path,
            dtype=torch.float32,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            max_cache_bytes=1 << 26,
        )
        return self.client([ServerProcess(n_threads=1).connect(make_engine, is_owner=True)])


class Observed(RLExperiment):
    """A run that keeps the model of its engine."""

    def get_engine(self, model: PreTrainedModel | None) -> InferenceEngine:
        self.model = model
        return super().get_engine(model)


def test_a_sync_does_not_round_the_weights_that_the_engine_shares(catch_run: list[str]) -> None:
    run = Observed(
        parse_cli([*catch_run, "trainer.policy.model.dtype=bfloat16", "trainer.policy.optimizer_config.lr=1e-5"])
    )
    run.run()
    weights = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
    assert weights.dtype == torch.float32
    assert (weights != weights.bfloat16()).float().mean() > 0.5


@pytest.mark.parametrize("transport", ["auto", "gloo", "nccl"])
def test_weights_reach_a_server_through_the_configured_transport(
    catch_run: list[str], transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    Served(parse_cli([*catch_run, *SERVER, f"generator.weight_sync_backend={transport}"])).run()
    for row in run_of(catch_run).metrics:
        assert row["sync/megabytes"] > 0.5
        assert row["sync/verified_copies"] == 1
        assert row["sync/logprob_gap"] < 1e-5
    is_replaced = "generator.weight_sync_backend=nccl: weights travel through shared memory" in caplog.text
    assert is_replaced == (transport == "nccl")


def test_a_server_that_receives_nothing_ends_the_run_in_the_configured_time(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.5)
    monkeypatch.setattr(Served, "client", SilentClient)
    cfg = parse_cli([*catch_run, *SERVER, "generator.weight_sync_timeout_seconds=2"])
    with pytest.raises(SyncError, match="weight sync 0: the engine did not connect within 2 s"):
        Served(cfg).run()


async def test_all_servers_can_reach_the_address_of_the_policy() -> None:
    networks = [found.address for nic in psutil.net_if_addrs().values() for found in nic if found.family == AF_INET]
    own = next((address for address in networks if not address.startswith("127.")), "127.0.0.1")
    for servers, expected in ((["127.0.0.1:8000"], "127.0.0.1"), (["127.0.0.1:8000", f"http://{own}:8000"], own)):
        with ThreadPoolExecutor(1) as executor:
            host, _, port = (await InlineLauncher(executor, servers=servers)._find_address()).rpartition(":")
        assert host == expected
        assert int(port) > 0


def write_cores(_: int, folder: Path, device: str) -> None:
    imitate_gpus(folder)
    with ThreadPoolExecutor(1) as executor:
        launcher = InlineLauncher(executor)
        launcher.device = torch.device(device)
        asyncio.run(launcher.start())
        own = executor.submit(os.sched_getaffinity, 0).result()
    (folder / "cores").write_text(f"{own} {os.sched_getaffinity(0)}")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_only_the_compute_thread_of_a_gpu_runs_on_the_cores_next_to_it(tmp_path: Path, device: str) -> None:
    write_sysfs(tmp_path, 1, str(MAX_CORE))
    mp.spawn(write_cores, (tmp_path, device))
    cores = os.sched_getaffinity(0)
    computing = {MAX_CORE} if device == "cuda" else cores
    assert (tmp_path / "cores").read_text() == f"{computing} {cores}"
