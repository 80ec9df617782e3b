"""The configuration: Hydra parses the command line, and typed sections check it. Never imports torch or ray."""

from skyrl_train.config.algorithm import AlgorithmConfig, GdpoConfig
from skyrl_train.config.cli import compose_config, config_dir, get_default_config, parse_cli, rewrite_overrides
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.loading import changed_settings, load_config, to_yaml, validate_cfg
from skyrl_train.config.policy import OptimizerConfig
from skyrl_train.config.policy_loss import OffPolicyCorrectionConfig
from skyrl_train.config.root import SkyRLConfig
from skyrl_train.config.trainer import TrainerConfig
