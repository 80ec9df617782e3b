"""Tensor and pipeline parallelism with Megatron-Core, an optional package that only this folder imports."""

import warnings

warnings.filterwarnings("ignore", message=r".*Apex (is|are) not installed")  # it is optional

from skyrl_train.distributed.megatron.strategy import MegatronStrategy  # noqa: E402
