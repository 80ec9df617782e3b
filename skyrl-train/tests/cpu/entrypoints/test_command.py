"""Process settings that a command changes and restores, and checks of its configuration."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from skyrl_train.config import get_default_config, load_config
from skyrl_train.entrypoints.command import collect_rarely, compute_thread, find_warnings, parse_cli, validate_cfg
from skyrl_train.errors import ConfigError


def test_one_compute_thread_gets_all_cores() -> None:
    n_before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with compute_thread() as executor:
            assert torch.get_num_threads() == 1
            assert executor.submit(torch.get_num_threads).result() == 2
            assert {executor.submit(threading.get_ident).result() for _ in range(5)} != {threading.get_ident()}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(n_before)
    assert not any(thread.name.startswith("compute") for thread in threading.enumerate())


def test_garbage_collector_settings_are_restored() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with collect_rarely():
        assert gc.get_threshold()[0] > before[0][0]
        assert gc.get_freeze_count() > before[1]
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_problems_of_configuration_and_algorithms_are_in_one_error() -> None:
    composed = get_default_config()
    composed.trainer.policy_mini_batch_size = 48
    composed.trainer.algorithm.advantage_estimator = "gae"
    for check in (
        lambda: validate_cfg(composed),
        lambda: validate_cfg(
            {"trainer": {"policy_mini_batch_size": 48, "algorithm": {"advantage_estimator": "gae"}}},
        ),
        lambda: parse_cli(["trainer.policy_mini_batch_size=48", "trainer.algorithm.advantage_estimator=gae"]),
    ):
        with pytest.raises(
            ConfigError, match=r"^2 problems(.|\n)*=48 must divide(.|\n)*=gae reads the values of a critic"
        ):
            check()


def test_a_typed_configuration_is_also_checked() -> None:
    cfg = load_config({"trainer": {"algorithm": {"advantage_estimator": "gae"}}})
    with pytest.raises(ConfigError, match="reads the values of a critic"):
        validate_cfg(cfg)
    assert validate_cfg(load_config()) == load_config()


def test_warnings_of_rules_and_of_algorithms_are_found() -> None:
    cfg = load_config({"trainer": {"algorithm": {"policy_loss_type": "gspo", "kl_estimator_type": "k1"}}})
    k1, reduction = find_warnings(cfg)
    assert "kl_estimator_type=k1 " in k1
    assert "published as a mean over trajectories" in reduction
