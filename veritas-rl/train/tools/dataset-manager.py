"""`data.custom_cls.path=tools/dataset-manager.py`: datasets whose rows are generated from task ids."""

from skyrl_gym.tasks.dataset import DynamicEnvDataset, LGCV2DynamicDataset

__all__ = ["DynamicEnvDataset", "LGCV2DynamicDataset"]
