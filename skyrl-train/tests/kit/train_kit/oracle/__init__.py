"""A specification of the update in plain torch and float64: rollouts as lists in, gradients out.

It is written from the papers, one trajectory at a time, to be compared with the trainer. It shares no code with the
trainer, uses neither padding nor micro-batches, and computes the whole vocabulary at every position.

    rollouts ── scores.py ──> log-probs, entropies, values ── advantages.py ──> advantages ── losses.py ──> token losses
             ── update.py ──> loss of the mini-batch ── Jacobian of the scores ──> gradient

A new estimator, policy loss, reduction or KL estimate gets a case in `advantages.py` or `losses.py`.
"""

from train_kit.oracle.rollouts import OracleRow, OracleTrajectory
from train_kit.oracle.settings import Settings
from train_kit.oracle.update import OracleUpdate, update

__all__ = ["OracleRow", "OracleTrajectory", "OracleUpdate", "Settings", "update"]
