"""Settings of one update."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of one update, named as in `trainer.algorithm`; some defaults differ so that a term has an effect."""

    advantage_estimator: str = "grpo"
    policy_loss_type: str = "regular"
    loss_reduction: str = "token_mean"
    max_seq_len: int = 40
    eps_clip_low: float = 0.1
    eps_clip_high: float = 0.3
    clip_ratio_c: float = 1.5
    gamma: float = 1.0
    lambd: float = 1.0
    grpo_norm_by_std: bool = True
    advantage_batch_normalize: bool = False
    use_kl_in_reward: bool = False
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.05
    kl_estimator_type: str = "k3"
    use_bias_correction_kl: bool = False
    use_entropy_loss: bool = False
    entropy_loss_coef: float = 0.02
    top_entropy_quantile: float = 1.0
    off_policy_sequence_mask_threshold: float | None = None
    tis_ratio_type: str | None = None
    tis_cap: float = 1.1
    value_clip: float | None = 0.2
