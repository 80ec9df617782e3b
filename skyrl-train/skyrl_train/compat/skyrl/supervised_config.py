"""Configurations of supervised runs, under the modules `config.sft` and `config.preferences` that had them before."""

from skyrl_train.config.supervised import DPOConfig, PreferenceDataConfig, RewardConfig, SFTConfig, SFTDataConfig

__all__ = ["DPOConfig", "PreferenceDataConfig", "RewardConfig", "SFTConfig", "SFTDataConfig"]
