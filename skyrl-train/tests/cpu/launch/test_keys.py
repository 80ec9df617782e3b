"""Every key of placement, engines and weight sync changes what a run starts or sends, or is refused."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.base import iter_fields
from skyrl_train.config.loading import load_config
from skyrl_train.entrypoints.engine import sync_options, sync_tolerance
from skyrl_train.entrypoints.load_learner import model_spec
from skyrl_train.launch.inline import InlineLauncher
from skyrl_train.launch.process import LocalRank, RankHost
from skyrl_train.launch.ray.launcher import list_requests
from skyrl_train.plan import RunPlan
from skyrl_train.types.specs import World
from skyrl_train.workers.group import WorkerGroup

PREFIXES = (
    "trainer.placement.",
    "trainer.strategy",
    "trainer.policy.megatron_config.",
    "generator.num_inference_engines",
    "generator.inference_engine_",
    "generator.weight_sync_",
    "generator.weight_transfer_",
    "generator.run_engines_locally",
    "generator.remote_inference_engine_urls",
)
RAY = "trainer.placement.launcher=ray"
APART = "trainer.placement.colocate_all=false"
FREE = "trainer.placement.colocate_policy_ref=false"
RANKS = [RAY, "trainer.placement.policy_num_gpus_per_node=4"]
MEGATRON = [*RANKS, "trainer.strategy=megatron", "trainer.policy.megatron_config.tensor_model_parallel_size=2"]
URLS = "generator.remote_inference_engine_urls=[gpu:8000]"
SERVERS = [RAY, "generator.backend=vllm", "generator.run_engines_locally=false"]

HONORED: list[tuple[list[str], list[str]]] = [  # a run, and changes of it
    ([], [RAY]),
    (RANKS, ["trainer.strategy=megatron"]),
    (
        MEGATRON,
        [
            "trainer.policy.megatron_config.tensor_model_parallel_size=4",
            "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
            "trainer.policy.megatron_config.context_parallel_size=2",
            "trainer.policy.megatron_config.sequence_parallel=true",
        ],
    ),
    (
        [RAY],
        [
            "trainer.placement.policy_num_nodes=2",
            "trainer.placement.policy_num_gpus_per_node=2",
            APART,
            "trainer.placement.offload_idle=true",
            "generator.weight_sync_backend=gloo",
            "generator.weight_transfer_threshold_cuda_ipc_GB=0.5",
            "generator.weight_sync_check=checksum",
            "generator.weight_sync_tolerance=0.5",
            "generator.weight_sync_delta=true",
            "generator.weight_sync_timeout_seconds=5",
        ],
    ),
    (
        [RAY, APART],
        [
            FREE,
            "trainer.placement.critic_num_nodes=2",
            "trainer.placement.critic_num_gpus_per_node=2",
            "generator.num_inference_engines=2",
        ],
    ),
    ([RAY, APART, FREE], ["trainer.placement.ref_num_nodes=2", "trainer.placement.ref_num_gpus_per_node=2"]),
    (
        [RAY, APART, "generator.backend=vllm"],
        [f"generator.inference_engine_{kind}_parallel_size=2" for kind in ("tensor", "pipeline", "data")],
    ),
    ([*SERVERS, URLS], ["generator.remote_inference_engine_urls=[gpu:8001]"]),
    (
        ["generator.backend=vllm", "generator.run_engines_locally=false", URLS],  # one process with a server
        [
            "generator.weight_sync_backend=gloo",
            "generator.weight_sync_backend=shm",
            "generator.weight_sync_check=off",
            "generator.weight_sync_check=checksum",
            "generator.weight_sync_tolerance=0.5",
            "generator.weight_sync_timeout_seconds=5",
        ],
    ),
]

REFUSED = [f"trainer.policy.megatron_config.expert_{kind}_parallel_size" for kind in ("model", "tensor")]
"""Keys that accept only their default, see `golden/config/wrong_values.txt`."""


def load(overrides: list[str]) -> SkyRLConfig:
    return load_config(OmegaConf.from_dotlist(overrides))


def describe_run(cfg: SkyRLConfig) -> dict[str, Any]:
    """Return the devices and servers of a run, who leaves them, how ranks divide the policy, and how its weights are
    sent.
    """
    placement, generator, policy = cfg.trainer.placement, cfg.generator, cfg.trainer.policy
    spec = model_spec("policy", math.prod, print, cfg.trainer, 1.0, sharding=policy)
    plan = RunPlan(cfg, has_gpus=False)
    is_copied = placement.uses_ray or not plan.needs_engine_model
    sync = sync_options(generator)
    if not placement.uses_ray:
        with ThreadPoolExecutor(1) as executor:
            group = WorkerGroup(spec, [LocalRank(executor, RankHost(World()))], None)
            sync = InlineLauncher(executor, sync, plan.receiving_servers).weight_sync(group, {}).options
    return {
        "devices": list_requests(
            placement, ["policy", "critic", "ref"], generator.n_local_engines, generator.n_devices_per_engine
        )
        if placement.uses_ray
        else None,
        "offloads_idle": plan.offloads_idle,
        "layout": (spec.layout(math.prod(placement.size("policy"))), spec.megatron),
        "servers": generator.remote_inference_engine_urls,
        "sync": sync,
        "tolerance": sync_tolerance(cfg, torch.device("cpu"), None, is_copied=is_copied),
    }


@pytest.mark.parametrize(("run", "change"), [(run, change) for run, changes in HONORED for change in changes])
def test_a_key_is_honored(run: list[str], change: str) -> None:
    assert describe_run(load([*run, change])) != describe_run(load(run))


def test_servers_are_used_in_place_of_local_engines() -> None:
    """The key `generator.run_engines_locally`, which needs URLs."""
    assert describe_run(load([*SERVERS, URLS])) != describe_run(load([RAY]))


def test_a_server_of_sglang_has_the_configured_time_to_load_weights() -> None:
    run = ["generator.backend=sglang", "generator.run_engines_locally=false", URLS]
    described = describe_run(load([*run, "generator.weight_sync_timeout_seconds=5"]))["sync"]
    assert (described.transport, described.timeout_s) == ("shared", 5)


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_a_transport_that_sglang_does_not_use_is_reported(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    section = {"backend": "sglang", "weight_sync_backend": transport}
    with caplog.at_level("INFO", logger="skyrl_train"):
        assert sync_options(SkyRLConfig.model_validate({"generator": section}).generator).transport == "auto"
    assert f"generator.weight_sync_backend={transport} has no effect with generator.backend=sglang" in caplog.text


def test_no_key_is_left_out() -> None:
    keys = {key for key, _ in iter_fields(SkyRLConfig) if key.startswith(PREFIXES)}
    changes = {change for _, changes in HONORED for change in changes} | {"generator.run_engines_locally=false"}
    tested = {change.partition("=")[0] for change in (*changes, *REFUSED)}
    assert keys == {key for key in tested if key.startswith(PREFIXES)}
