"""The configuration: Hydra parses the command line, and typed sections check it. Never imports torch or ray."""

from skyrl_train.config.algorithm import (
    AlgorithmConfig,
    DynamicSamplingConfig,
    GdpoConfig,
    KLControllerConfig,
    OffPolicyCorrectionConfig,
)
from skyrl_train.config.cli import compose_config, config_dir, parse_cli
from skyrl_train.config.generator import EvalSamplingConfig, GeneratorConfig, SamplingConfig
from skyrl_train.config.loading import changed_settings, load_config, to_yaml, validate_cfg
from skyrl_train.config.policy import (
    CriticConfig,
    CriticModelConfig,
    OptimizerConfig,
    PolicyConfig,
    PolicyModelConfig,
    RefConfig,
    RefModelConfig,
)
from skyrl_train.config.root import DataConfig, EnvironmentConfig, SkyRLConfig, SkyRLGymConfig
from skyrl_train.config.trainer import PlacementConfig, TrainerConfig
