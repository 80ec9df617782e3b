"""The modules and classes that SkyRL's scripts import."""

from __future__ import annotations

from importlib import import_module

import pytest

NAMES = {
    "skyrl_train.dataset": ["PromptDataset"],
    "skyrl_train.dataset.preprocess": ["convert_prompts_responses_to_batch_tensors"],
    "skyrl_train.distributed": ["DistributedStrategy"],
    "skyrl_train.entrypoints.main_base": ["BasePPOExp", "config_dir", "validate_cfg"],
    "skyrl_train.generators.base": ["GeneratorInput", "GeneratorInterface", "GeneratorOutput"],
    "skyrl_train.generators.skyrl_gym_generator": ["SkyRLGymGenerator"],
    "skyrl_train.inference_engines.ray_wrapped_inference_engine": ["RayWrappedInferenceEngine"],
    "skyrl_train.inference_engines.remote_inference_engine": ["RemoteInferenceEngine"],
    "skyrl_train.model_wrapper": ["HFModelWrapper"],
    "skyrl_train.trainer": ["RayPPOTrainer"],
    "skyrl_train.training_batch": ["TrainingInputBatch"],
    "skyrl_train.utils": ["initialize_ray", "validate_cfg"],
    "skyrl_train.utils.ppo_utils": ["AdvantageEstimatorRegistry", "PolicyLossRegistry", "register_policy_loss"],
    "skyrl_train.weight_sync": ["WeightSync"],
    "skyrl_train.workers.fsdp.fsdp_worker": ["CriticWorker", "PolicyWorker", "RefWorker"],
}


@pytest.mark.parametrize("module", NAMES)
def test_names_that_scripts_import_exist(module: str) -> None:
    for name in NAMES[module]:
        assert callable(getattr(import_module(module), name)) or name == "config_dir" or name.endswith("Registry")
