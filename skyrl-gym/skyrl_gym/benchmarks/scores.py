"""Scores of benchmarks with confidence intervals."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_gym.metrics import all_fail_probability

Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its 95% confidence interval, e.g. ``Estimate(0.5, 0.24, 0.76)``."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one benchmark. Failed samples count as wrong, because a model may provoke failures."""

    name: str
    n_problems: int
    n_samples: int  # per problem
    accuracy: Estimate
    pass_at: Mapping[int, Estimate]  # by k above 1
    cut_off: float  # share of samples that reached the token limit
    failed: float  # share of samples without a grade


def score_benchmarks(samples: Iterable[Mapping[str, Any]]) -> list[Score]:
    """Return a score per benchmark, in order of appearance.

    Args:
        samples: rows with `data_source`, `uid` (equal for the samples of a problem up to the last ``_``), `is_success`,
            `stop_reason` and `error`, as an evaluation of the trainer writes them.
    """
    benchmarks: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for sample in samples:
        problems = benchmarks.setdefault(sample["data_source"], {})
        problems.setdefault(sample["uid"].rpartition("_")[0], []).append(sample)
    return [_score(name, list(problems.values())) for name, problems in benchmarks.items()]


def _score(name: str, problems: Sequence[Sequence[Mapping[str, Any]]]) -> Score:
    n_samples = min(map(len, problems))
    passed = [(len(samples), sum(bool(sample["is_success"]) for sample in samples)) for samples in problems]
    pass_at = {}
    for k in (2**i for i in range(1, n_samples.bit_length())):
        pass_at[k] = estimate([1 - all_fail_probability(n, n_passed, k) for n, n_passed in passed])
    every = [sample for samples in problems for sample in samples]
    return Score(
        name,
        len(problems),
        n_samples,
        estimate([n_passed / n for n, n_passed in passed]),
        pass_at,
        statistics.fmean(sample["stop_reason"] == "length" for sample in every),
        statistics.fmean(sample["error"] is not None for sample in every),
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of the problems' values, from 0 to 1, and Wilson's interval for it.

    Several samples per problem make the values vary less than coins do. The interval then has the effective number of
    problems that this variance corresponds to. Problems are independent. Samples of one problem are not.

    Sources: Wilson 1927. Franco et al. 2019, "Comparative study of confidence intervals for proportions in complex
    sample surveys", for the effective number.

    >>> print(estimate([1.0, 0.0, 1.0, 1.0]))
    75.0% (30.1% to 95.4%)
    """
    n, mean = len(values), statistics.fmean(values)
    if n > 1 and (variance := statistics.variance(values)) > 0:
        n_effective = max(n, mean * (1 - mean) / (variance / n))
    else:
        n_effective = n
    center = (mean + Z**2 / (2 * n_effective)) / (1 + Z**2 / n_effective)
    spread = math.sqrt(mean * (1 - mean) / n_effective + Z**2 / (4 * n_effective**2))
    half = Z * spread / (1 + Z**2 / n_effective)
    return Estimate(mean, max(0.0, center - half), min(1.0, center + half))


def format_scores(scores: Sequence[Score]) -> str:
    """Return a table, one line per benchmark."""
    header = ["benchmark", "problems", "samples", "accuracy (95% interval)", "pass@k", "cut off", "failed"]
    rows = []
    for score in scores:
        largest = max(score.pass_at, default=None)
        pass_at = "" if largest is None else f"pass@{largest} {score.pass_at[largest]}"
        counts = [f"{score.n_problems:,}", str(score.n_samples)]
        rows.append([score.name, *counts, str(score.accuracy), pass_at, f"{score.cut_off:.1%}", f"{score.failed:.1%}"])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)
