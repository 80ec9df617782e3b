"""What an engine asks of a backend, which owns the base model, the models under training, and the samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tx.models.config import LoraConfig
from tx.tinker.types import AdamParams, Pass, PassResult, SampleRequest, SampleResult

Done = Callable[[SampleResult | Exception], None]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What is served."""

    name: str  # as users call it
    folder: Path
    vocab_size: int
    max_context: int  # positions
    eos_ids: tuple[int, ...]
    can_train_all: bool  # rank 0


Weights = Any
"""Frozen weights to sample from, of a kind that only the backend knows: whatever is trained later, they stay so."""


class Sampler(Protocol):
    """Who samples. It is called from one thread."""

    def weights_of(self, model_id: str) -> Weights:
        """A model's weights as they are now."""

    def load_weights(self, folder: Path) -> Weights:
        """What `save_weights` or `save_model` wrote."""

    def base_weights(self) -> Weights:
        """The base model's."""

    def sample(self, asked: SampleRequest, weights: Weights, done: Done) -> Callable[[], None]:
        """Take a request, whose result `done` gets during some later `step`; returns what cancels it."""

    def step(self) -> bool:
        """Do a little of the sampling; whether there was any."""


class Backend(Sampler, Protocol):
    """Who trains, and samples, too. One process has one, called from one thread; `UserError` has changed nothing."""

    @property
    def base_model(self) -> BaseModel:
        """What is served."""

    def create_model(self, model_id: str, lora: LoraConfig) -> None:
        """A new model, which starts from the base model."""

    def delete_model(self, model_id: str) -> None:
        """Forget a model; its samplers stay."""

    def models(self) -> Mapping[str, LoraConfig]:
        """Those under training."""

    def counts(self) -> Mapping[str, int]:
        """What an operator may want to know, by name, e.g. how many samples are running."""

    def compute(self, asked: Pass) -> Iterator[PassResult | None]:
        """Compute a pass a little at a time: None after each part but the last, and then the result.

        Passes of different models may take turns. Gradients of a model add up over its passes until `optim_step`; a
        pass that fails, by raising, adds nothing.
        """

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """One step with the gradients so far, which are zero afterwards; metrics."""

    def save_model(self, model_id: str, folder: Path) -> None:
        """Write weights, optimizer and settings into an empty folder."""

    def load_model(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """A new model from what `save_model` wrote."""

    def save_weights(self, model_id: str, folder: Path) -> None:
        """Write the weights alone, in a format that others read, too."""
