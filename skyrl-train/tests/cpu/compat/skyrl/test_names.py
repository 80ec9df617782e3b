"""The modules and names that SkyRL's scripts import: those that exist here, and those that do not."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from skyrl_train.compat.skyrl.absent import CLIENT_METHODS, EXPERIMENT_METHODS, MISSING_NAMES, MODULES, TRAINER_METHODS

GUIDE = Path(__file__).parents[5] / "docs/guides/coming-from-skyrl.md"

NAMES = """
config.utils: get_default_config
dataset: PromptDataset
dataset.preprocess: convert_prompts_responses_to_batch_tensors
distributed: DistributedStrategy
entrypoints.main_base: BasePPOExp config_dir main skyrl_entrypoint validate_cfg
entrypoints.main_generate: EvalOnlyEntrypoint main
evaluate: evaluate
fully_async_trainer: FullyAsyncRayPPOTrainer
generators.base: BatchMetadata ConversationType GeneratorInput GeneratorInterface GeneratorOutput TrainingPhase
    TrajectoryID
generators.skyrl_gym_generator: GeneratorInput GeneratorOutput SkyRLGymGenerator
generators.utils: apply_overlong_filtering concatenate_generator_outputs encode_messages_subset
    get_custom_chat_template get_generation_prompt_ids get_response_ids_and_loss_mask_from_messages
    get_rollout_metrics
inference_engines.base: ConversationType InferenceEngineInput InferenceEngineOutput
inference_engines.inference_engine_client: InferenceEngineClient
inference_engines.ray_wrapped_inference_engine: RayWrappedInferenceEngine
inference_engines.remote_inference_engine: RemoteInferenceEngine
inference_engines.utils: get_sampling_params_for_backend
model_wrapper: HFModelWrapper
trainer: RayPPOTrainer
training_batch: TrainingInputBatch
utils: Timer initialize_ray validate_cfg
utils.ppo_utils: AdvantageEstimatorRegistry PolicyLossRegistry compute_advantages_and_returns
    normalize_advantages_dict register_policy_loss
utils.tracking: Tracking
utils.trainer_utils: ResumeMode validate_generator_output zero_variance_filter
utils.utils: Timer initialize_ray validate_cfg
weight_sync: WeightSync
workers.fsdp.fsdp_worker: CriticWorker PolicyWorker RefWorker
workers.megatron.megatron_worker: CriticWorker PolicyWorker RefWorker
"""
"""Modules, each with names that scripts import from it."""


def test_names_that_scripts_import_exist() -> None:
    for line in re.sub(r"\n ", " ", NAMES).strip().splitlines():
        module, _, names = line.partition(": ")
        for name in names.split():
            assert getattr(import_module(f"skyrl_train.{module}"), name) is not None


def test_names_and_methods_without_a_counterpart_are_in_the_guide() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for module, names in MISSING_NAMES.items():
        for name in names:
            assert f"`{name}`" in guide, f"{module}.{name}"
    for module in MODULES:
        assert f"`{module}`" in guide
    for name in CLIENT_METHODS | EXPERIMENT_METHODS | TRAINER_METHODS:
        assert f"`{name}`" in guide


def test_modules_can_be_the_first_import_of_a_process() -> None:
    for name in (
        "compat.skyrl.keys",
        "compat.verl.keys",
        "compat.verl.command",
        "compat.skyrl.experiment",
        "config",
        "plan",
    ):
        subprocess.run([sys.executable, "-c", f"import skyrl_train.{name}"], check=True, timeout=100)
