"""A model and its head as one module, for a strategy to wrap."""

import logging
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import cast

import torch
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.media.processing import has_vision
from skyrl_train.models.loading import check_head
from skyrl_train.models.logprobs import hidden_before, on_mask, response_logprobs
from skyrl_train.models.prefix_sharing import find_sharing_fault
from skyrl_train.models.routing import Routers, measuring_experts
from skyrl_train.models.sequence_parallel import SequenceGroup
from skyrl_train.types import Metrics, Scores, TokenScores, TrainingBatch, ValueScores

logger = logging.getLogger(__name__)


class Scorer(torch.nn.Module):
    """A module that scores the tokens with loss mask 1."""

    scores_type: type[TokenScores | ValueScores] = TokenScores
    shares_prefixes = False
    """True if prefixes shared within a micro-batch are computed once."""

    export_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    """Dtypes of tensors in exports and weight syncs, by name, where they differ from the trained weights."""

    @property
    @abstractmethod
    def hf_model(self) -> PreTrainedModel:
        """The Hugging Face model. If weights have another form, a model on the meta device that describes them."""

    def measuring_experts(self) -> AbstractContextManager[Metrics]:
        """Return a context that yields `routing.measuring_experts`, or no metrics if they are not supported."""
        return nullcontext(Metrics())


class ScoringModule(Scorer):
    """A scorer with a Hugging Face language model, critic or reward model.

    Body and head run in one forward pass, so FSDP gathers the parameters of both. The head runs on trained positions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        is_critic: bool = False,
        sequence_group: SequenceGroup | None = None,
        replays_experts: bool = False,
    ) -> None:
        """Wrap a model whose logits are divided by `temperature`. `entropy_grad` makes entropies differentiable, at a
        cost of two more values per logit. The ranks of `sequence_group` get the same rows and split their tokens.
        `replays_experts` uses the experts in `TrainingBatch.experts`, or raises ConfigError if the model has none.
        """
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._entropy_grad = entropy_grad
        self._sequence_group = sequence_group
        self._replays_experts = replays_experts
        if replays_experts:
            Routers.of(model)
        self.scores_type = ValueScores if is_critic else TokenScores

    @property
    def hf_model(self) -> PreTrainedModel:
        return self.model

    def can_share(self, rows: TrainingBatch) -> bool:
        """Return True if prefixes of a micro-batch are computed once. A tree of prefixes has no place for images."""
        return self.shares_prefixes and not any(rows.images or ())

    def measuring_experts(self) -> AbstractContextManager[Metrics]:
        return measuring_experts(self.model, self._sequence_group)

    def forward(self, rows: TrainingBatch) -> Scores:
        """Score a micro-batch: values for a critic, else log-probs and entropies, (B, R) and 0 outside the mask."""
        tokens, shares_prefixes = (rows.sequences, rows.attention_mask, rows.loss_mask), self.can_share(rows)
        if self._replays_experts:
            Routers.of(self.model).replay(None)  # clear the previous micro-batch's experts
        if self.scores_type is ValueScores:
            # A token's value is the value of the state before it, i.e. of its prefix without the token itself.
            hidden, mask = hidden_before(
                self.model, *tokens, shares_prefixes, self._sequence_group, images=rows.images
            )  # (N, H)
            head = cast(torch.nn.Linear, self.model.score)
            with torch.autocast(hidden.device.type, enabled=False):  # bfloat16 is too coarse for values
                if head.weight.dtype == torch.float32:
                    values = head(hidden.float())  # (N, 1), in a call, because FSDP2 may shard the head on its own
                else:
                    bias = None if head.bias is None else head.bias.float()
                    values = torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)
            return ValueScores(on_mask(values[:, 0], mask, self._sequence_group))
        return response_logprobs(
            self.model,
            *tokens,
            self._temperature,
            entropy_grad=self._entropy_grad,
            shares_prefixes=shares_prefixes,
            group=self._sequence_group,
            experts=rows.experts if self._replays_experts else None,
            images=rows.images,
        )

    def probe(self, source: str | None = None) -> None:
        """Run a few tokens to find out if rows can share prefixes, and to check the head if there is a `source`.

        Raise ConfigError if the head is not supported, or if the tokens cannot be split across ranks.
        """
        reads_images = has_vision(self.model.config) and self._sequence_group is not None
        fault = "it reads images" if reads_images else find_sharing_fault(self.model, self._sequence_group)
        self.shares_prefixes = fault is None
        if fault is not None:
            name = type(self.model).__name__
            if self._sequence_group is not None:
                raise ConfigError(
                    f"{self._sequence_group.setting} cannot split the tokens of a {name} across ranks, because "
                    f"{fault}; remove it"
                )
            logger.info("A %s computes every row separately, because %s", name, fault)
        if source is not None and self.scores_type is TokenScores:
            check_head(self.model, source)
