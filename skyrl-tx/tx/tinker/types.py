"""Types shared by the server, the engine and the backends. The wire formats are in `wire/`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_STOP_TOKENS = 16
"""Maximum number of stop tokens or strings per request."""
MAX_TOP = 32
"""Maximum number of most likely tokens reported per position."""
MAX_ERROR_CHARACTERS = 2000
"""Maximum length of an error message."""


class TinkerError(Exception):
    """A request failed."""


class UserError(TinkerError):
    """Invalid input from the user. The message names the value and the fix."""


def error_text(error: Exception) -> str:
    """Return an error as text for the database, without characters that it rejects."""
    text = str(error) if isinstance(error, TinkerError) else f"{type(error).__name__}: {error}"
    return text[:MAX_ERROR_CHARACTERS].replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image in a client's input. It takes the tokens from its first to its last placeholder."""

    content: bytes
    format: str  # png or jpeg
    expected_tokens: int | None  # number of its tokens that the client expects


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image whose placeholders are among the tokens from `start` to `end` of a sequence."""

    start: int
    end: int
    image: Any  # in a backend-specific type


ReadImage = Callable[[ImageInput], tuple[Sequence[int], Any]]
"""Returns the tokens and the backend-specific form of an image. Raises `UserError` if the image cannot be used."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A training sequence: position i is read and predicts `inputs["target_tokens"][i]`."""

    tokens: np.ndarray  # (N,) int32
    inputs: Mapping[str, np.ndarray]  # each (N,), or (N, K) for K targets per position
    images: Sequence[PlacedImage] = ()  # in order


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over data, and a backward pass unless `is_forward_only`."""

    model_id: str
    data: Sequence[Datum]
    loss_fn: str
    settings: Mapping[str, float] = field(default_factory=dict)
    is_forward_only: bool = False


@dataclass(frozen=True, slots=True)
class PassResult:
    """A pass's result per datum. `loss` is the sum."""

    loss: float
    logprobs: Sequence[np.ndarray]  # (N,) or (N, K) float32
    token_losses: Sequence[np.ndarray]  # the same shapes


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of one AdamW step (Loshchilov and Hutter, 2017, arXiv:1711.05101)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # global norm. 0 disables clipping.


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of a request."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to sample continuations of a prompt, and optionally log-probs of the prompt."""

    prompt: Sequence[int]
    params: SamplingParams
    n_samples: int = 1
    wants_prompt_logprobs: bool = False
    n_top_prompt: int = 0
    n_top_sampled: int = 0
    owner: str = ""  # samples are scheduled fairly among owners
    images: Sequence[PlacedImage] = ()  # of the prompt, in order


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at each position, in decreasing order."""

    tokens: np.ndarray  # (n, k) int32
    logprobs: np.ndarray  # (n, k) float32


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]  # of the distribution before top-k and top-p
    is_stopped: bool  # True if a stop token or string ended it, False if the length did
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The result of a sample request."""

    samples: Sequence[Sample]
    prompt_logprobs: np.ndarray | None = None  # (N,) float32; the first is NaN
    top_prompt: TopLogprobs | None = None  # the first row is empty
