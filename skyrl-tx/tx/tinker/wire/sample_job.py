"""Payload of a `SAMPLE` request: the validated request and its weights."""

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from tx.tinker.types import ImageInput, PlacedImage, ReadImage, SampleRequest, SamplingParams
from tx.tinker.wire.chunks import Part, join_parts


class SampleWeights(BaseModel):
    """Weights to sample from: the base model's unless a path or a snapshot is set."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    base_model: str
    model_path: str | None = None
    snapshot: str | None = None
    """Id of the sampling session that holds the snapshot."""


class PromptImage(BaseModel):
    """An image after the first `n_before` text tokens of a prompt."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    n_before: int
    content: bytes
    format: str
    expected_tokens: int | None

    @property
    def input(self) -> ImageInput:
        """The image for the backend."""
        return ImageInput(self.content, self.format, self.expected_tokens)


class SampleJob(BaseModel):
    """A validated sample request, except for limits that only the engine knows."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    weights: SampleWeights
    prompt: list[int]
    """Text tokens."""
    images: list[PromptImage] = []
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

    def read_prompt(
        self, read_image: ReadImage, max_context: int | None = None
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the tokens of the prompt, and where the images are among them.

        Raises:
            UserError: an image cannot be read, or would end after `max_context` tokens.
        """
        if not self.images:
            return self.prompt, ()
        parts: list[Part] = []
        start = 0
        for image in self.images:
            parts += [np.array(self.prompt[start : image.n_before], np.int32), image.input]
            start = image.n_before
        parts.append(np.array(self.prompt[start:], np.int32))
        tokens, images = join_parts(parts, read_image, "prompt", max_context)
        return tokens.tolist(), images

    def request(
        self,
        prompt: Sequence[int],
        images: Sequence[PlacedImage],
        *,
        owner: str,
        eos_ids: Sequence[int],
        max_context: int,
    ) -> SampleRequest:
        """Return the request for the backend, with a prompt that `read_prompt` has returned."""
        n_remaining = max_context - len(prompt) + 1  # the last sampled token is never read
        return SampleRequest(
            prompt=prompt,
            images=images,
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
