"""The nouns that the server, the engine and its backends speak. What goes over the wire is in `wire/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

MOST_STOP_TOKENS = 16
"""That end a sample, in one request."""
MOST_TOP = 32
"""Of the likeliest tokens that can be told for a position."""


class TinkerError(Exception):
    """What goes wrong with a request."""


class UserError(TinkerError):
    """It is the user's: the message says which value, and what to do."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence to learn from: position i is read, and predicts `inputs["target_tokens"][i]`."""

    tokens: np.ndarray  # (N,) int32
    inputs: Mapping[str, np.ndarray]  # each (N,), or (N, K) for several targets


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass over data, and the backward pass unless `is_forward_only`."""

    model_id: str
    data: Sequence[Datum]
    loss_fn: str
    settings: Mapping[str, float] = field(default_factory=dict)
    is_forward_only: bool = False


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass found, for each datum; `loss` is the sum."""

    loss: float
    logprobs: Sequence[np.ndarray]  # (N,) or (N, K) float32
    token_losses: Sequence[np.ndarray]  # the same shapes


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Of one step: AdamW (Loshchilov and Hutter, 2017, arXiv:1711.05101)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # of all gradients together; 0: none


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Of one request."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Samples after a prompt, and what to say of the prompt."""

    prompt: Sequence[int]
    params: SamplingParams
    n_samples: int = 1
    wants_prompt_logprobs: bool = False
    n_top_prompt: int = 0
    n_top_sampled: int = 0
    owner: str = ""  # owners take turns, and the requests of each


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens of some positions, the first the likeliest."""

    tokens: np.ndarray  # (n, k) int32
    logprobs: np.ndarray  # (n, k) float32


@dataclass(frozen=True, slots=True)
class Sample:
    """One of the samples."""

    tokens: Sequence[int]
    logprobs: Sequence[float]  # of the distribution sampled from, before top-k and top-p
    is_stopped: bool  # by a stop token or string, and not by the length
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What a request asked for."""

    samples: Sequence[Sample]
    prompt_logprobs: np.ndarray | None = None  # (N,) float32; the first is NaN
    top_prompt: TopLogprobs | None = None  # its first row is of no position
