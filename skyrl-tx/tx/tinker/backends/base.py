"""The backend protocol. A backend owns the base model, the models under training, and the samplers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tx.models.config import AdapterConfig
from tx.tinker.types import AdamParams, ImageInput, Pass, PassResult, SampleRequest, SampleResult

Done = Callable[[SampleResult | Exception], None]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The served base model."""

    name: str  # the name that clients use
    folder: Path
    vocab_size: int
    max_context: int  # positions
    eos_ids: tuple[int, ...]
    can_train_all: bool  # supports rank 0


Weights = Any
"""Frozen weights to sample from, in a backend-specific type. Later training does not change them."""


Save = Callable[[Path], None]
"""Writes into an empty folder."""


class Sampler(Protocol):
    """Samples from weights. Called from one thread."""

    def read_image(self, image: ImageInput) -> tuple[Sequence[int], Any]:
        """Return an image's tokens, from its first to its last placeholder, and its form for passes and requests.

        Raises:
            UserError: the model reads only text, or the image cannot be read, or has other than its expected tokens.
        """

    def load_weights(self, folder: Path) -> Weights:
        """Load the weights in a folder written by `Backend.capture`."""

    def base_weights(self) -> Weights:
        """Return the weights of the base model."""

    def sample(self, request: SampleRequest, weights: Weights, done: Done) -> Callable[[], None]:
        """Queue a request. Return a function that cancels it. `done` gets the result during a later `step`."""

    def step(self) -> bool:
        """Do a slice of the sampling. Return True if there was any."""


class Backend(Sampler, Protocol):
    """Trains and samples. One per process, called from one thread. A call that raises `UserError` has no effect."""

    @property
    def base_model(self) -> BaseModel:
        """The served base model."""

    @property
    def is_compiling(self) -> bool:
        """True while a program compiles, which may take minutes. Any thread may read it."""

    def create_model(self, model_id: str, lora: AdapterConfig) -> None:
        """Create a model that starts from the base model."""

    def delete_model(self, model_id: str) -> None:
        """Delete a model. Its frozen weights stay valid."""

    def models(self) -> Mapping[str, AdapterConfig]:
        """Return the models under training."""

    def counts(self) -> Mapping[str, int]:
        """Return counters for operators, e.g. the number of running samples, by name."""

    def compute(self, pass_: Pass) -> Iterator[PassResult | None]:
        """Compute a pass in slices: yield None after each slice except the last, then the result.

        Passes of different models may interleave. A model's gradients accumulate over passes until `optim_step`, but a
        pass that raises adds none.
        """

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Step with the accumulated gradients, then reset them. Return metrics.

        Raises:
            UserError: the gradient norm is NaN or infinite. Weights and optimizer are unchanged.
        """

    def drop_gradients(self, model_id: str) -> None:
        """Reset the accumulated gradients without a step. Do nothing if there is no such model."""

    def weights_of(self, model_id: str) -> Weights:
        """Freeze a model's current weights, to sample from."""

    def n_bytes(self, model_id: str, *, with_optimizer: bool) -> int:
        """Return the number of bytes that `capture` would write."""

    def capture(self, model_id: str, *, with_optimizer: bool) -> Save:
        """Capture a model's state. Return a function that writes it to an empty folder and may run on any thread.

        Weights and settings are always written, in a format that other programs read.
        """

    def load_model(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Create a model from a folder written by `capture`."""
