"""Devices of engines: which GPUs the process of an engine sees. Ray books GPUs that need not exist."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from ray.cluster_utils import Cluster
from transformers import PreTrainedModel

from skyrl_train.config.trainer import PlacementConfig
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.hf import load_engine
from skyrl_train.launch.launcher import started
from skyrl_train.launch.ray.cluster import connect
from skyrl_train.launch.ray.launcher import RayLauncher
from skyrl_train.launch.ray.placement import DeviceRequest, Reservation

pytestmark = pytest.mark.timeout(300)


def start_and_record(folder: Path, path: Path, _: PreTrainedModel | None) -> InferenceEngine:
    """Return an engine, after writing the GPUs that its process sees into a file of `folder`."""
    (folder / str(os.getpid())).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_cache_bytes": 1 << 20}
    return load_engine(str(path), dtype=torch.float32, **limits)


def placement(*, colocate_all: bool, n_nodes: int, n_per_node: int) -> PlacementConfig:
    return PlacementConfig(
        launcher="ray", colocate_all=colocate_all, policy_num_nodes=n_nodes, policy_num_gpus_per_node=n_per_node
    )


@pytest.mark.parametrize(
    ("n_gpus", "engine_size", "n_engines", "config"),
    [
        ((4,), 2, 2, placement(colocate_all=True, n_nodes=1, n_per_node=4)),
        ((3, 3), 2, 2, placement(colocate_all=True, n_nodes=2, n_per_node=3)),
        ((2, 2), 2, 2, placement(colocate_all=False, n_nodes=1, n_per_node=1)),
        ((2,), 1, 2, placement(colocate_all=True, n_nodes=1, n_per_node=2)),
    ],
)
async def test_an_engine_sees_its_own_gpus(
    n_gpus: tuple[int, ...],
    engine_size: int,
    n_engines: int,
    config: PlacementConfig,
    start_cluster: Callable[..., Cluster],
    tiny_model_path: Path,
    tmp_path: Path,
) -> None:
    start_cluster(*n_gpus, has_gpus=True)
    launcher = RayLauncher(config, [], None, n_engines=n_engines, engine_size=engine_size)
    async with started(launcher):
        engine = await launcher.start_engine(partial(start_and_record, tmp_path, tiny_model_path), 120)
        await engine.close()
    found = [set(file.read_text().split(",")) for file in tmp_path.iterdir()]
    assert [len(gpus) for gpus in found] == [engine_size] * n_engines
    if len(n_gpus) == 1:  # otherwise, both nodes number their GPUs from 0
        assert not set.intersection(*found)


def start_slowly(_: PreTrainedModel | None) -> InferenceEngine:
    time.sleep(60)
    raise AssertionError("the start timeout has passed")


async def test_an_engine_that_exceeds_its_start_timeout_names_the_key(start_cluster: Callable[..., Cluster]) -> None:
    start_cluster(1, has_gpus=True)
    launcher = RayLauncher(placement(colocate_all=True, n_nodes=1, n_per_node=1), [], None, n_engines=1)
    message = r"the engine was not ready in 0\.5 s; raise generator\.engine_start_timeout_seconds$"
    async with started(launcher):
        with pytest.raises(EngineError, match=message):
            await launcher.start_engine(start_slowly, 0.5)


def test_a_run_waits_for_nodes_with_gpus(
    start_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_RAY_JOIN_TIMEOUT_IN_S", "120")
    cluster = start_cluster(2)
    connect()
    with ThreadPoolExecutor(1) as pool:
        reserving = pool.submit(Reservation, [DeviceRequest(("policy",), 1, 2)])
        time.sleep(2)
        assert not reserving.done()
        cluster.add_node(num_cpus=2, num_gpus=2)
        assert reserving.result().kind == "GPU"


def test_gpus_of_a_node_without_cpus_for_them_are_not_counted(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(1)
    cluster.add_node(num_cpus=1, num_gpus=4)
    with pytest.raises(ConfigError, match=r"1 × 2 GPUs for engine .* has 1 GPU with a CPU for each on 2 nodes: 0 \+ 1"):
        RayLauncher(placement(colocate_all=True, n_nodes=1, n_per_node=2), [], None, n_engines=1)


@pytest.mark.parametrize("value", ["5m", "nan", "inf"])
def test_a_timeout_that_is_no_number_is_named(
    start_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SKYRL_RAY_JOIN_TIMEOUT_IN_S", value)
    start_cluster(1)
    expected = f"SKYRL_RAY_JOIN_TIMEOUT_IN_S={value} must be a number of seconds, such as 180"
    with pytest.raises(ConfigError, match=expected):
        RayLauncher(placement(colocate_all=True, n_nodes=1, n_per_node=1), [], None, n_engines=1)


def test_an_engine_larger_than_every_node_is_refused(start_cluster: Callable[..., Cluster]) -> None:
    start_cluster(3, 3, has_gpus=True)
    config = placement(colocate_all=False, n_nodes=1, n_per_node=1)
    with pytest.raises(
        ConfigError, match=r"asks for 1 × 4 GPUs for engine .*, but the Ray cluster has 6 GPUs on 2 nodes: 3 \+ 3\. "
    ):
        RayLauncher(config, [], None, n_engines=1, engine_size=4)
