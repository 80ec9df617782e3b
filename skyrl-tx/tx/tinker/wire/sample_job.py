"""Payload of a `SAMPLE` request: the validated request and its weights."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from tx.tinker.types import SampleRequest, SamplingParams


class SampleWeights(BaseModel):
    """Weights to sample from: the base model's unless a path or a snapshot is set."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    base_model: str
    model_path: str | None = None
    snapshot: str | None = None
    """Id of the sampling session that holds the snapshot."""


class SampleJob(BaseModel):
    """A validated sample request, except for limits that only the engine knows."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    weights: SampleWeights
    prompt: list[int]
    n_samples: int
    max_tokens: int | None
    """None samples until the context is full."""
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop_tokens: list[int] | None
    """None means the model's EOS tokens."""
    stop_strings: list[str]
    wants_prompt_logprobs: bool
    n_top_prompt: int
    n_top_sampled: int

    def request(self, *, owner: str, eos_ids: Sequence[int], max_context: int) -> SampleRequest:
        """Return the request for the backend."""
        n_remaining = max_context - len(self.prompt) + 1  # the last sampled token is never read
        return SampleRequest(
            prompt=self.prompt,
            params=SamplingParams(
                max_tokens=n_remaining if self.max_tokens is None else self.max_tokens,
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
