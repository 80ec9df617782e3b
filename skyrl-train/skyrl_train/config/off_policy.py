"""`trainer.algorithm.off_policy_correction.*`: the engine that sampled is not exactly the policy that learns."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt

from skyrl_train.config.base import Section

Ratio = Annotated[float, Gt(0)]


class OffPolicyCorrectionConfig(Section):
    """What to do about κ = π_old / π_rollout, the ratio of the trainer's probability of a token to the engine's.

    All off by default; how far κ is from 1 is logged in any case.
    """

    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Truncated importance sampling: multiply the policy loss by min(κ, cap), per token or by the product over the
    trajectory."""

    token_tis_ratio_clip_high: Ratio = 2.0
    """The cap when `tis_ratio_type=token`."""

    sequence_tis_ratio_clip_high: Ratio = 5.0
    """The cap when `tis_ratio_type=sequence`."""

    sequence_mask_metric: Literal["product", "geometric"] | None = None
    """Leave out trajectories whose product, or geometric mean, of κ is outside of its interval."""

    product_mask_low: Ratio = 0.5
    """Lower end of the interval for `product`."""

    product_mask_high: Ratio = 2.0
    """Upper end of the interval for `product`."""

    geo_mask_low: Ratio = 0.99
    """Lower end of the interval for `geometric`."""

    geo_mask_high: Ratio = 1.01
    """Upper end of the interval for `geometric`."""

    token_mask_is_threshold_low: Ratio | None = None
    """Leave out tokens whose κ is below this; needs `token_mask_is_threshold_high`."""

    token_mask_is_threshold_high: Ratio | None = None
    """Leave out tokens whose κ is above this; needs `token_mask_is_threshold_low`."""

    outlier_token_is_threshold_low: Ratio | None = None
    """Leave out trajectories with a token whose κ is below this."""

    outlier_token_is_threshold_high: Ratio | None = None
    """Leave out trajectories with a token whose κ is above this."""

    @property
    def is_on(self) -> bool:
        """Whether anything is corrected."""
        thresholds = (
            self.token_mask_is_threshold_low,
            self.outlier_token_is_threshold_low,
            self.outlier_token_is_threshold_high,
        )
        return any(choice is not None for choice in (self.tis_ratio_type, self.sequence_mask_metric, *thresholds))
