"""Detection of steps that the policy cannot learn from."""

from collections.abc import Mapping, Sequence

N_STEPS = 3
GUIDE = "docs/guides/debugging.md"


def find_missing_signal(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Return a warning if the last `N_STEPS` steps all had advantages of 0 or a gradient of 0, else None.

    Rows without these metrics, such as step 0, are ignored.
    """
    for metric, meaning in (
        ("loss/avg_raw_advantages_abs", "all advantages were 0, because the rewards within each group are equal"),
        ("policy/grad_norm", "the gradient was 0"),
    ):
        newest = [row[metric] for row in rows if row.get(metric) is not None][-N_STEPS:]
        if len(newest) == N_STEPS and not any(newest):
            return f"In the last {N_STEPS} steps, {meaning}: the policy is not learning. See {GUIDE}."
    return None
