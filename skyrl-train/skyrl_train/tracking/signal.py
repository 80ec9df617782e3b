"""Detection of steps that the policy cannot learn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

N_STEPS = 3
GUIDE = "docs/guides/debugging.md"


def find_missing_signal(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Return a warning if the newest steps of `metrics.jsonl` all lack advantages, or a gradient; else None.

    Rows without the metrics, such as step 0, are ignored.
    """
    for metric, meaning in (
        ("loss/avg_raw_advantages_abs", "all advantages are 0: in every group all rewards are equal"),
        ("policy/grad_norm", "the gradient is 0"),
    ):
        newest = [row[metric] for row in rows if row.get(metric) is not None][-N_STEPS:]
        if len(newest) == N_STEPS and not any(newest):
            return f"In the last {N_STEPS} steps {meaning}, so that the policy does not learn; see {GUIDE}."
    return None
