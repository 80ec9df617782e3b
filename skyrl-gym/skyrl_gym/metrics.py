"""Aggregation of per-episode metrics into logged numbers."""

import logging
import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_gym.envs.registration import registry, spec
from skyrl_gym.runtime.text import clean_text

logger = logging.getLogger(__name__)

EpisodeMetrics = Mapping[str, Any]
"""The `get_metrics` of an episode."""

Aggregate = Callable[[Sequence[EpisodeMetrics]], dict[str, Any]]

_warned: set[str] = set()
"""Environments with a failing `aggregate_metrics` that have already been logged."""


def all_fail_probability(n_samples: int, n_passed: int, k: int) -> float:
    """Return the probability that k of a prompt's samples, drawn without replacement, all fail. 1 minus it is pass@k.

    Source: Evaluating Large Language Models Trained on Code (Chen et al., 2021, arXiv:2107.03374), equation 1.

    >>> all_fail_probability(4, 2, 2)
    0.16666666666666666
    """
    return math.comb(n_samples - n_passed, k) / math.comb(n_samples, k)


def default_aggregate_metrics(metrics: Sequence[EpisodeMetrics]) -> dict[str, float]:
    """Return the mean of each key over the episodes that have it. Booleans are numbers. Other types are dropped.

    >>> default_aggregate_metrics([{"steps": 5, "caught": True}, {"steps": 3, "caught": False, "name": "x"}])
    {'steps': 4.0, 'caught': 0.5}
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for episode in metrics:
        for key, value in episode.items():
            if (number := _as_number(value)) is not None:
                values[key].append(number)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}


def aggregate_for_environment(env_name: str, metrics: Sequence[EpisodeMetrics]) -> dict[str, Any]:
    """Aggregate the episodes of a registered environment with its class's `aggregate_metrics`.

    Episodes without metrics (the environment reports none, or the rollout failed before its first step) are dropped
    first, so `aggregate_metrics` may rely on its own keys. If it fails, or cannot be imported because the environment
    runs in another interpreter, the default rule applies and a warning is logged once.

    Raises:
        UnregisteredEnv: (a ValueError) `env_name` is not registered in this process.
    """
    reported = [episode for episode in metrics if episode]
    env_spec = spec(env_name)
    if not reported:
        return {}
    try:
        rule: Aggregate = getattr(env_spec.load(), "aggregate_metrics", default_aggregate_metrics)
        converted = {clean_text(str(name)): _as_number(value) for name, value in rule(reported).items()}
        if (dropped := [name for name, number in converted.items() if number is None]) and env_name not in _warned:
            _warned.add(env_name)
            logger.warning("aggregate_metrics of %s returns no number for %s, which is left out", env_name, dropped)
        return {name: number for name, number in converted.items() if number is not None}
    except Exception as problem:  # noqa: BLE001, the boundary of user code
        if env_name not in _warned:
            _warned.add(env_name)
            logger.warning("The metrics of %s are averaged because its aggregate_metrics failed: %r", env_name, problem)
        return default_aggregate_metrics(reported)


def aggregate_by_environment(env_classes: Sequence[str], metrics: Sequence[EpisodeMetrics]) -> dict[str, Any]:
    """Aggregate a batch of episodes [B], possibly of several environments, into the logged metrics.

    Every number is logged as ``environment/{env_class}/{key}``, so environments with a common key do not overwrite each
    other. A batch from a single environment also gets ``environment/{key}``.

    >>> aggregate_by_environment(["catch", "catch"], [{"catch_rate": 1}, {"catch_rate": 0}])
    {'environment/catch/catch_rate': 0.5, 'environment/catch_rate': 0.5}

    Environments that are not registered in this process, e.g. another program's, use the default rule.

    Raises:
        ValueError: the two lists differ in length.
    """
    if len(env_classes) != len(metrics):
        raise ValueError(
            f"got {len(env_classes)} env_classes for the metrics of {len(metrics)} episodes; their lengths must agree"
        )
    episodes: defaultdict[str, list[EpisodeMetrics]] = defaultdict(list)
    for env_class, episode in zip(env_classes, metrics, strict=True):
        episodes[env_class].append(episode)
    aggregates = {
        name: aggregate_for_environment(name, group) if name in registry else default_aggregate_metrics(group)
        for name, group in episodes.items()
    }

    logged = {f"environment/{env}/{key}": value for env, group in aggregates.items() for key, value in group.items()}
    if len(aggregates) == 1:
        (only,) = aggregates.values()
        logged |= {f"environment/{key}": value for key, value in only.items()}
    return logged


def _as_number(value: Any) -> float | None:
    if getattr(value, "shape", None) == ():  # a numpy scalar or a tensor without dimensions
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer with hundreds of digits
        return math.copysign(math.inf, 1 if value > 0 else -1)  # type: ignore[operator]
