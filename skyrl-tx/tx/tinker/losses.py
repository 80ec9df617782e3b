"""Per-token losses of the Tinker API. Callers sum them over tokens and datums.

lp: log-prob of the target under the current weights · q: log-prob when it was sampled · A: advantage · w: weight r =
exp(lp - q): probability ratio

    cross_entropy         -w lp
    importance_sampling   -r A
    ppo                   -min(r A, clip(r, low, high) A)                       Schulman et al., 2017, arXiv:1707.06347
    cispo                 -sg(clip(r, low, high)) A lp                          MiniMax, 2025, arXiv:2506.13585
    dro                   -(A lp - beta / 2 (lp - q)²)                         Richemond et al., 2024, arXiv:2405.19107
    gspo                  as ppo, with r = exp of the sequence mean of lp - q,  Zheng et al., 2025, arXiv:2507.18071
                          and the gradient of the token

Tokens with weight 0 are masked, whatever their values. Tokens with A = 0 are masked in importance_sampling, ppo and
cispo, however far lp and q are apart. In dro, they count through their distance to q, unless q = 0 too: clients send A
= q = 0 for prompts. In gspo, they count in the sequence mean where `sequence_ratio_mask` is not 0.

The functions serve JAX and PyTorch: `xp` provides `exp`, `clip`, `where`, `sum` and `stop_gradient`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tx.tinker.types import Datum, Pass

Array = Any
Tensors = Mapping[str, Array]
"""Tensors by their names in `loss_fn_inputs`, all with the shape of `lp`."""


def _has_weight(inputs: Tensors) -> Array:
    return inputs["weights"] != 0


def _has_advantage(inputs: Tensors) -> Array:
    return _has_weight(inputs) & (inputs["advantages"] != 0)


def _is_sampled(inputs: Tensors) -> Array:
    return _has_weight(inputs) & ((inputs["advantages"] != 0) | (inputs["logprobs"] != 0))


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, its inputs, and its settings with their defaults."""

    function: Callable[[Any, Array, Tensors, Mapping[str, Any]], Array]
    needs: tuple[str, ...]
    settings: Mapping[str, float] = field(default_factory=dict)
    optional: tuple[str, ...] = ("weights",)
    counts: Callable[[Tensors], Array] = _has_weight
    """Return the mask of trained tokens. Masked values may be anything."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of all inputs that the loss reads."""
        return (*self.needs, *self.optional)

    def select_inputs(self, datum: Datum) -> dict[str, np.ndarray]:
        """Return the inputs that the loss reads from a datum."""
        return {name: value for name, value in datum.inputs.items() if name in self.inputs}


def _cross_entropy(xp: Any, lp: Array, inputs: Tensors, settings: Mapping[str, Any]) -> Array:
    return -lp


def _importance_sampling(xp: Any, lp: Array, inputs: Tensors, settings: Mapping[str, Any]) -> Array:
    return -xp.exp(lp - inputs["logprobs"]) * inputs["advantages"]


def _ppo(xp: Any, lp: Array, inputs: Tensors, settings: Mapping[str, Any]) -> Array:
    return _clip_loss(xp, lp - inputs["logprobs"], inputs["advantages"], settings)


def _cispo(xp: Any, lp: Array, inputs: Tensors, settings: Mapping[str, Any]) -> Array:
    ratio = xp.exp(lp - inputs["logprobs"])
    weight = xp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -xp.stop_gradient(weight) * inputs["advantages"] * lp


def _dro(xp: Any, lp: Array, inputs: Tensors, settings: Mapping[str, Any]) -> Array:
    gap = lp - inputs["logprobs"]
    return -(inputs["advantages"] * lp - 0.5 * settings["beta"] * gap * gap)


def _gspo(xp: Any, lp: Array, inputs: Tensors, settings: Mapping[str, Any]) -> Array:
    counts = inputs["sequence_ratio_mask"] != 0
    gaps = xp.where(counts, xp.stop_gradient(lp) - inputs["logprobs"], 0.0)
    n_counted = xp.sum(xp.where(counts, 1.0, 0.0), -1)[..., None]
    mean = xp.sum(gaps, -1)[..., None] / xp.clip(n_counted, 1.0, None)
    has_advantage = inputs["advantages"] != 0
    log_ratio = xp.where(has_advantage, mean + (lp - xp.stop_gradient(lp)), 0.0)
    return _clip_loss(xp, log_ratio, inputs["advantages"], settings)


def _clip_loss(xp: Any, log_ratio: Array, advantages: Array, settings: Mapping[str, Any]) -> Array:
    """Return -min(r A, clip(r, low, high) A). The gradient skips clipped values: it would be NaN for an infinite r."""
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

IGNORED_INPUTS = frozenset({"mask", *(name for loss in LOSSES.values() for name in loss.inputs)})
"""Inputs that every loss accepts without reading them: recipes leave other losses' inputs, and their own `mask`, in the
data. Any other name is rejected, because it may be misspelled."""


def token_losses(name: str, xp: Any, lp: Array, inputs: Tensors, settings: Mapping[str, Any]) -> Array:
    """Return the loss of each token, in the shape of `lp`. `inputs` must contain weights."""
    loss = LOSSES[name]
    counts = loss.counts(inputs)
    sound = {key: xp.where(counts, value, 0.0) for key, value in inputs.items()}
    losses = loss.function(xp, xp.where(counts, lp, 0.0), sound, settings)
    return xp.where(counts, losses * sound["weights"], 0.0)


def fill_defaults(pass_: Pass) -> Pass:
    """Return the pass with default settings, a weight for every target, and only the inputs that its loss reads."""
    loss = LOSSES[pass_.loss_fn]
    data = []
    for datum in pass_.data:
        inputs = loss.select_inputs(datum)
        inputs.setdefault("weights", np.ones(inputs["target_tokens"].shape, np.float32))
        data.append(replace(datum, inputs=inputs))
    return replace(pass_, data=data, settings={**loss.settings, **pass_.settings})
