"""The losses of the Tinker interface, for each token. Whoever calls sums them: over tokens, and over datums.

lp: log-prob of the target now · q: when it was sampled · A: advantage · w: weight · r = exp(lp - q)

    cross_entropy         -w lp
    importance_sampling   -r A
    ppo                   -min(r A, clip(r, low, high) A)                       Schulman et al., 2017, arXiv:1707.06347
    cispo                 -sg(clip(r, low, high)) A lp                          MiniMax, 2025, arXiv:2506.13585
    dro                   -(A lp - beta / 2 (lp - q)²)                         Richemond et al., 2024, arXiv:2405.19107
    gspo                  as ppo, where r = exp of the mean of lp - q           Zheng et al., 2025, arXiv:2507.18071
                          over the sequence, and its gradient the token's

A token of weight 0 counts nothing, whatever stands there. Nor does one with A = 0 in importance_sampling, ppo and
cispo, however far lp and q are from each other. In dro such a token counts for its distance to q, but for q = 0, which
is what clients send for prompts; and in gspo it counts in the sequence's mean, where `sequence_ratio_mask` is not 0.

The functions are the same for JAX and PyTorch: `xp` has `exp`, `clip`, `where`, `sum` and `stop_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tx.tinker.types import Datum, Pass

Array = Any
Tensors = Mapping[str, Array]
"""By the names of `loss_fn_inputs`; all of the shape of `lp`."""


def _has_weight(given: Tensors) -> Array:
    return given["weights"] != 0


def _has_advantage(given: Tensors) -> Array:
    return _has_weight(given) & (given["advantages"] != 0)


def _is_sampled(given: Tensors) -> Array:
    return _has_weight(given) & ((given["advantages"] != 0) | (given["logprobs"] != 0))


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, what it needs of a datum, and its settings with their defaults."""

    function: Callable[[Any, Array, Tensors, Mapping[str, Any]], Array]
    needs: tuple[str, ...]
    settings: Mapping[str, float] = field(default_factory=dict)
    optional: tuple[str, ...] = ("weights",)
    counts: Callable[[Tensors], Array] = _has_weight
    """Which tokens count; the others may be anything."""


def _cross_entropy(xp: Any, lp: Array, given: Tensors, settings: Mapping[str, Any]) -> Array:
    return -lp


def _importance_sampling(xp: Any, lp: Array, given: Tensors, settings: Mapping[str, Any]) -> Array:
    return -xp.exp(lp - given["logprobs"]) * given["advantages"]


def _ppo(xp: Any, lp: Array, given: Tensors, settings: Mapping[str, Any]) -> Array:
    return _clipped(xp, lp - given["logprobs"], given["advantages"], settings)


def _cispo(xp: Any, lp: Array, given: Tensors, settings: Mapping[str, Any]) -> Array:
    ratio = xp.exp(lp - given["logprobs"])
    weight = xp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -xp.stop_gradient(weight) * given["advantages"] * lp


def _dro(xp: Any, lp: Array, given: Tensors, settings: Mapping[str, Any]) -> Array:
    gap = lp - given["logprobs"]
    return -(given["advantages"] * lp - 0.5 * settings["beta"] * gap * gap)


def _gspo(xp: Any, lp: Array, given: Tensors, settings: Mapping[str, Any]) -> Array:
    counts = given["sequence_ratio_mask"] != 0
    gaps = xp.where(counts, xp.stop_gradient(lp) - given["logprobs"], 0.0)
    n_counted = xp.sum(xp.where(counts, 1.0, 0.0), -1)[..., None]
    mean = xp.sum(gaps, -1)[..., None] / xp.clip(n_counted, 1.0, None)
    has_advantage = given["advantages"] != 0
    log_ratio = xp.where(has_advantage, mean + (lp - xp.stop_gradient(lp)), 0.0)
    return _clipped(xp, log_ratio, given["advantages"], settings)


def _clipped(xp: Any, log_ratio: Array, advantages: Array, settings: Mapping[str, Any]) -> Array:
    """-min(r A, clip(r, low, high) A). The gradient never sees what is clipped: of an infinite r, it would be NaN."""
    ratio = xp.exp(xp.stop_gradient(log_ratio))
    clipped = xp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])
    is_clipped = clipped * advantages < ratio * advantages
    return -xp.where(is_clipped, clipped, xp.exp(xp.where(is_clipped, 0.0, log_ratio))) * advantages


POLICY = ("target_tokens", "logprobs", "advantages")
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, ("target_tokens",)),
    "importance_sampling": Loss(_importance_sampling, POLICY, counts=_has_advantage),
    "ppo": Loss(_ppo, POLICY, CLIPS, counts=_has_advantage),
    "cispo": Loss(_cispo, POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, counts=_has_advantage),
    "dro": Loss(_dro, POLICY, {"beta": 0.05}, counts=_is_sampled),
    "gspo": Loss(_gspo, (*POLICY, "sequence_ratio_mask"), CLIPS),
}


def token_losses(name: str, xp: Any, lp: Array, given: Tensors, settings: Mapping[str, Any]) -> Array:
    """The loss of each token, of the shape of `lp`; `given` has weights of 1 where the datum has none."""
    loss = LOSSES[name]
    counts = loss.counts(given)
    sound = {key: xp.where(counts, value, 0.0) for key, value in given.items()}
    losses = loss.function(xp, xp.where(counts, lp, 0.0), sound, settings)
    return xp.where(counts, losses * sound["weights"], 0.0)


def completed(asked: Pass) -> Pass:
    """The same pass with all settings of its loss, and a weight for every target."""
    return replace(
        asked,
        data=[datum if "weights" in datum.inputs else _weighted(datum) for datum in asked.data],
        settings={**LOSSES[asked.loss_fn].settings, **asked.settings},
    )


def _weighted(datum: Datum) -> Datum:
    ones = np.ones(datum.inputs["target_tokens"].shape, np.float32)
    return Datum(datum.tokens, {**datum.inputs, "weights": ones})
