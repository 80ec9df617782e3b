import logging
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf
from train_kit import golden

from skyrl_report.summary import find_method
from skyrl_train.config.loading import RL, Schema, validate, validate_cfg
from skyrl_train.config.supervised import DPO, REWARD, SFT, SFTConfig
from skyrl_train.errors import ConfigError

DATA = {"train_data": "train.jsonl"}


def load(**sections: Any) -> SFTConfig:
    return validate({"data": DATA, **sections}, SFT)


def find_error(overrides: str) -> str:
    source = OmegaConf.from_dotlist(["data.train_data=train.jsonl", *overrides.split()])
    return golden.catch(ConfigError, lambda: validate(source, SFT))


def test_conflicts_are_refused(pytestconfig: pytest.Config) -> None:
    printed = {overrides: [find_error(overrides)] for overrides in golden.read("config/sft")}
    golden.compare("config/sft", printed, pytestconfig)


def test_sharding_under_torchrun_is_that_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    fsdp = {"cpu_offload": True, "fsdp_size": 2}
    policy = load(trainer={"policy": {"fsdp_config": fsdp, "sequence_parallel_size": 4}}).trainer.policy
    assert (policy.fsdp_config.fsdp_size, policy.sequence_parallel_size) == (2, 4)


def test_several_ranks_need_ray_or_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    ranks = {"policy_num_gpus_per_node": 2}
    with pytest.raises(
        ConfigError, match=r"needs Ray, .* or start the ranks with trainer\.placement\.launcher=torchrun"
    ):
        load(trainer={"placement": ranks})
    placement = load(trainer={"placement": {**ranks, "launcher": "torchrun"}}).trainer.placement
    assert placement.uses_torchrun
    with pytest.raises(ConfigError, match=r"needs Ray, .* or train in one process with .*launcher=inline"):
        validate_cfg({"trainer": {"placement": ranks}})
    with pytest.raises(ConfigError, match="launcher=torchrun must be one of auto, inline, ray;"):
        validate_cfg({"trainer": {"placement": {**ranks, "launcher": "torchrun"}}})


def test_validation_on_the_training_data_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(data={**DATA, "val_data": "train.jsonl"})
    assert "train.jsonl is in data.train_data and in data.val_data" in caplog.text


@pytest.mark.parametrize(
    ("schema", "title"),
    [
        (RL, "Reinforcement learning"),
        (SFT, "Supervised fine-tuning"),
        (DPO, "Direct preference optimization"),
        (REWARD, "Reward modeling"),
    ],
)
def test_the_method_follows_from_the_configuration(schema: Schema[Any], title: str) -> None:
    method = find_method(schema.root().model_dump(mode="json"))
    assert method.title == title
