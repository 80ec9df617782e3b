import pytest

from skyrl_train.config import get_default_config
from skyrl_train.entrypoints.command import parse_cli, validate_cfg
from skyrl_train.errors import ConfigError


def test_problems_of_configuration_and_algorithms_are_in_one_error() -> None:
    composed = get_default_config()
    composed.trainer.policy_mini_batch_size = 48
    composed.trainer.algorithm.advantage_estimator = "gae"
    for check in (
        lambda: validate_cfg(composed),
        lambda: validate_cfg({"trainer": {"policy_mini_batch_size": 48, "algorithm": {"advantage_estimator": "gae"}}}),
        lambda: parse_cli(["trainer.policy_mini_batch_size=48", "trainer.algorithm.advantage_estimator=gae"]),
    ):
        with pytest.raises(ConfigError, match=r"^2 problems(.|\n)*=48 must divide(.|\n)*=gae needs a critic's values"):
            check()
