"""Our losses against those of TRL's GRPOTrainer: value, and gradient in all weights of a tiny model; in float32.

Both sides compute log-probs from the same weights and tokens, ours with `response_logprobs`. All tokens of a row have
the same advantage, as in TRL. Every row has a token, because TRL counts rows without one in its means.

Our KL and entropy are means over trajectories; those of TRL are reduced like the policy loss. With `token_mean` both
agree if all rows have the same length.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.differential.batches import FLOAT32
from train_kit.differential.trl import MAX_LENGTH, ON_CPU, Inputs, gradient, loss_trainer, random_inputs, scores_of
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.rewards import get_soft_overlong_punishment

from skyrl_train.algorithms.contract import resolve_policy_loss
from skyrl_train.algorithms.objectives import PolicyObjective
from skyrl_train.algorithms.reward_pipeline import soft_overlong_punishment
from skyrl_train.config.algorithm import (
    AlgorithmConfig,
    CispoConfig,
    GmpoConfig,
    LossReduction,
    SapoConfig,
    VespoConfig,
)
from skyrl_train.types import TokenScores, TrainingBatch

SEEDS = range(6)
OUR_CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.28, "use_kl_loss": False}
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}


@dataclass(frozen=True)
class Case:
    """A loss by our name and settings, and by those of TRL."""

    loss: str
    reduction: LossReduction
    ours: dict[str, Any]
    theirs: dict[str, Any]
    drift: float = 0.3  # nats per token
    has_equal_lengths: bool = False
    trainer: type[GRPOTrainer] = GRPOTrainer
    config: type[GRPOConfig] = field(default=GRPOConfig)


def clipped(
    loss_type: str,
    reduction: LossReduction,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    has_equal_lengths: bool = False,
) -> Case:
    """Return the clipped surrogate with an additional term."""
    theirs = {"loss_type": loss_type, **CLIP, **theirs}
    return Case("regular", reduction, OUR_CLIP | ours, theirs, has_equal_lengths=has_equal_lengths)


WITH_KL = {"use_kl_loss": True}
UNBIASED_KL = {"use_kl_loss": True, "use_bias_correction_kl": True}
BIASED_KL = {"beta": 0.3, "use_bias_correction_kl": False}
SEQUENCE = {"importance_sampling_level": "sequence", **CLIP}
CASES = {
    "grpo": clipped("grpo", "sequence_mean", {}, {}),
    "bnpo": clipped("bnpo", "token_mean", {}, {}),
    "dapo": clipped("dapo", "token_mean", {}, {}),
    "dr_grpo": clipped("dr_grpo", "seq_mean_token_sum_norm", {"max_seq_len": MAX_LENGTH}, {}),
    "temperature": clipped("dapo", "token_mean", {"temperature": 0.7}, {"temperature": 0.7}),
    "two-sided clip": Case(
        "dual_clip",
        "token_mean",
        OUR_CLIP | {"clip_ratio_c": 1.5},
        {"loss_type": "dapo", "delta": 1.5, **CLIP},
        drift=1.0,
    ),
    "cispo": Case(
        "cispo",
        "token_mean",
        {"use_kl_loss": False, "cispo": CispoConfig(cispo_eps_clip_low=1.0, cispo_eps_clip_high=0.5)},
        {"loss_type": "cispo", "epsilon_high": 1.5},  # a bound of the ratio itself, without a lower bound
        drift=1.0,
    ),
    "sapo": Case(
        "sapo",
        "sequence_mean",
        {"use_kl_loss": False, "sapo": SapoConfig(tau_pos=1.2, tau_neg=1.7)},
        {"loss_type": "sapo", "sapo_temperature_pos": 1.2, "sapo_temperature_neg": 1.7},
        drift=1.0,
    ),
    "vespo": Case(
        "vespo",
        "token_mean",
        {"use_kl_loss": False, "vespo": VespoConfig(k_pos=1.5, lambda_pos=2.5, k_neg=2.5, lambda_neg=1.5)},
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.5,
            "vespo_lambda_pos": 2.5,
            "vespo_k_neg": 2.5,
            "vespo_lambda_neg": 1.5,
        },
    ),
    "gspo": Case("gspo", "sequence_mean", OUR_CLIP, {"loss_type": "grpo", **SEQUENCE}, drift=1.0),
    "luspo": Case("luspo", "sequence_mean", OUR_CLIP, {"loss_type": "luspo", **SEQUENCE}, drift=1.0),
    "gmpo": Case(
        "gmpo",
        "sequence_mean",
        {"use_kl_loss": False, "gmpo": GmpoConfig(log_ratio_clip=0.3)},
        {"epsilon": 0.3},
        trainer=GMPOTrainer,
        config=GMPOConfig,
    ),
    "KL": clipped("dapo", "token_mean", WITH_KL, BIASED_KL, has_equal_lengths=True),
    "KL of sequences": clipped("grpo", "sequence_mean", WITH_KL, BIASED_KL),
    "KL without bias": clipped("dapo", "token_mean", UNBIASED_KL, {"beta": 0.3}, has_equal_lengths=True),
    "KL of sequences without bias": clipped("grpo", "sequence_mean", UNBIASED_KL, {"beta": 0.3}),
    "entropy bonus": clipped(
        "dapo", "token_mean", {"use_entropy_loss": True}, {"entropy_coef": 0.3}, has_equal_lengths=True
    ),
    "off-policy sequence mask": clipped(
        "dapo", "token_mean", {"off_policy_sequence_mask_threshold": 0.1}, {"off_policy_mask_threshold": 0.1}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses(name: str, tiny_model_path: Path, tmp_path: Path) -> None:
    """The drift of `gmpo` and `vespo` is small, because we clamp ratios that overflow and TRL does not."""
    case = CASES[name]
    trainer = loss_trainer(
        tiny_model_path,
        case.config(str(tmp_path), **ON_CPU, max_completion_length=MAX_LENGTH, **case.theirs),
        case.trainer,
    )
    settings = {"kl_loss_coef": 0.3, "entropy_loss_coef": 0.3, "loss_reduction": case.reduction, **case.ours}
    config = AlgorithmConfig(policy_loss_type=case.loss, **settings)
    for seed in SEEDS:
        assert_same_loss(trainer, config, seed, case.drift, case.has_equal_lengths)


@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.75])
def test_top_entropy_tokens(quantile: float, tiny_model_path: Path, tmp_path: Path) -> None:
    """Compare only whole numbers of tokens; otherwise we round up, and TRL may keep one token fewer."""
    theirs = {"loss_type": "dapo", "top_entropy_quantile": quantile, **CLIP}
    trainer = loss_trainer(
        tiny_model_path, GRPOConfig(str(tmp_path), **ON_CPU, max_completion_length=MAX_LENGTH, **theirs)
    )
    config = AlgorithmConfig(top_entropy_quantile=quantile, **OUR_CLIP)
    n_compared = 0
    for seed in range(40):
        inputs = random_inputs(trainer.model, seed, drift=0.3, temperature=1.0)
        if inputs["completion_mask"].sum() % 4 == 0:
            assert_same_loss(trainer, config, seed, drift=0.3)
            n_compared += 1
    assert n_compared > 5


def assert_same_loss(
    trainer: GRPOTrainer, config: AlgorithmConfig, seed: int, drift: float, has_equal_lengths: bool = False
) -> None:
    temperature = trainer.args.temperature
    inputs = random_inputs(trainer.model, seed, drift, temperature, MAX_LENGTH if has_equal_lengths else 1)
    ours = our_loss(scores_of(trainer.model, inputs, temperature), inputs, config)
    our_gradient = gradient(ours, trainer.model)
    theirs = trainer.compute_loss(trainer.model, inputs)
    their_gradient = gradient(theirs, trainer.model)
    torch.testing.assert_close(ours, theirs, rtol=FLOAT32, atol=FLOAT32)
    assert (our_gradient - their_gradient).norm() <= FLOAT32 * our_gradient.norm()


def our_loss(scores: TokenScores, inputs: Inputs, config: AlgorithmConfig) -> torch.Tensor:
    """Return the loss of a mini-batch from `PolicyObjective`, which the workers minimize."""
    mask = inputs["completion_mask"].float()
    batch = TrainingBatch(
        sequences=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        loss_mask=mask,
        draws=torch.arange(len(mask)),
        old_logprobs=inputs["old_per_token_logps"],
        ref_logprobs=inputs["ref_per_token_logps"],
        rollout_logprobs=inputs["sampling_per_token_logps"],
        entropies=scores.entropy.detach(),
        advantages=inputs["advantages"][:, None].expand(mask.shape),
    )
    objective = PolicyObjective(resolve_policy_loss(config), config)
    return objective(scores, objective.add_weights(batch))[0]


def test_soft_overlong_punishment() -> None:
    """Compare with a factor of 1, that of TRL."""
    lengths = range(1, 30)
    theirs = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)(
        completion_ids=[[0] * length for length in lengths]
    )
    ours = [soft_overlong_punishment(length, max_tokens=20, buffer=8, factor=1.0) for length in lengths]
    assert ours == pytest.approx(theirs)
