"""Advantage estimators: rewards (B, R) in, advantages and returns (B, R) out, both exactly 0 outside the mask.

Most read only a row or its group. But some read the whole batch, so it must not be split before them: `reinforce++`,
`reinforce++-baseline`, `gae`, `gae_per_turn` and `gdpo` whiten over it, and `gpg` counts its trajectories.

Returns are rewards-to-go where an estimator adds up rewards over time, V + A where there is a critic, and the
advantages themselves otherwise.
"""

from skyrl_train.algorithms.advantages.by_group import (
    gdpo,
    gpg,
    group_normalized,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from skyrl_train.algorithms.advantages.by_token import (
    gae,
    on_policy_distillation,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
    reward_to_go,
    token_rewards,
)
from skyrl_train.algorithms.advantages.by_turn import gae_per_turn, grpo_per_turn, rloo_per_turn, turn_index
from skyrl_train.algorithms.advantages.groups import group_statistics, trajectory_scores
from skyrl_train.algorithms.masked import normalize_over_batch
