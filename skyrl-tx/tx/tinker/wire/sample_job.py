"""The payload of a `SAMPLE` request: what a client asked, and from which weights."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from tx.tinker.types import SampleRequest, SamplingParams


class SampleWeights(BaseModel):
    """The base model's where there is neither a path nor a snapshot."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    base_model: str
    model_path: str | None = None
    snapshot: str | None = None
    """The id of the sampling session whose weights were kept when it was made."""


class SampleJob(BaseModel):
    """What is validated, but for what only the engine knows: see `request`."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    weights: SampleWeights
    prompt: list[int]
    n_samples: int
    max_tokens: int | None
    """None: as many as there is room for."""
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop_tokens: list[int] | None
    """None: those that end a sequence of the model."""
    stop_strings: list[str]
    wants_prompt_logprobs: bool
    n_top_prompt: int
    n_top_sampled: int

    def request(self, *, owner: str, eos_ids: Sequence[int], max_context: int) -> SampleRequest:
        """As backends take it."""
        most_tokens = max_context - len(self.prompt) + 1  # the last is not read
        return SampleRequest(
            prompt=self.prompt,
            params=SamplingParams(
                max_tokens=most_tokens if self.max_tokens is None else self.max_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=self.seed,
                stop_tokens=tuple(eos_ids if self.stop_tokens is None else self.stop_tokens),
                stop_strings=tuple(self.stop_strings),
            ),
            n_samples=self.n_samples,
            wants_prompt_logprobs=self.wants_prompt_logprobs,
            n_top_prompt=self.n_top_prompt,
            n_top_sampled=self.n_top_sampled,
            owner=owner,
        )
