"""Routers of a mixture of experts: replay of the engine's choices, and counts of the trainer's.

With router replay, the trainer uses the experts that the engine chose for each token. The engine and the trainer batch
tokens differently, so router logits differ by rounding. If the K-th and the next expert are nearly tied, rounding can
flip the choice, and the token's log-prob changes far more than by rounding alone. So the engine records its choice for
every token that it reads, and the trainer's routers repeat it (Ma et al., 2025, arXiv:2510.11370). The weights of the
experts, and so the router's gradient, still come from the trainer's logits.

Each architecture has its own router code, but nearly all pick K of E experts with `torch.topk`. Hooks on the decoder
layers intercept that call, also when the backward pass recomputes a checkpointed layer:

    torch.topk(scores, 2)        scores = [0.1 0.4 0.2 0.3]    own choice    values 0.4 0.3    experts 1 3
                                 replayed experts 1 2          result        values 0.4 0.2    experts 1 2

Updates count the choices, to show whether experts are used equally. Each trained token counts once per layer, for the
experts of the position that predicts it. So the counts of micro-batches and ranks add up to the step's counts, even if
prefixes are shared, layers are recomputed or rows only fill up a rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.sequence_parallel import SequenceGroup, sum_over_ranks
from skyrl_train.types import UNKNOWN_EXPERT, Metric, MetricKind, Metrics

N_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Configuration fields for the number of experts. The name depends on the architecture."""
N_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk")
"""Configuration fields for the number of experts per token."""

LOAD_METRICS: tuple[MetricKind, ...] = ("expert_load_max", "expert_load_min", "experts_unused")

ATTRIBUTE = "skyrl_routers"
"""Attribute of a model for its `Routers`."""

Record = Callable[[int, torch.Tensor], None]
"""A function of a layer's index and the experts (T, K) that its router chose."""


class Routers:
    """The routers of a model. They choose their own experts unless `replay` sets them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Attach to a model's decoder layers. Raise ConfigError if its experts or its layers are not found."""
        config = model.config.get_text_config()
        self.n_experts, self.n_chosen = (
            next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
            for names in (N_EXPERTS, N_CHOSEN)
        )
        layers = getattr(model.base_model, "layers", None)
        if not self.n_experts or not self.n_chosen or not isinstance(layers, torch.nn.ModuleList):
            raise ConfigError(
                f"trainer.algorithm.router_replay=true found no experts in a {type(model).__name__}: it needs one of "
                f"{', '.join(N_EXPERTS)} and one of {', '.join(N_CHOSEN)} in its configuration, and its layers in "
                "`base_model.layers`; set trainer.algorithm.router_replay=false"
            )
        self.n_layers = len(layers)
        self._name = type(model).__name__
        self._record: Record | None = None
        self._experts: torch.Tensor | None = None
        self._selected: torch.Tensor | None = None
        self._has_recorded = False
        self._counts: dict[int, torch.Tensor] | None = None  # (E,) by layer, None unless `measuring_experts`
        self._uses = torch.empty(0)  # (T,)
        self._uncounted: set[int] = set()  # layers whose choice is not counted yet in this pass
        for index, layer in enumerate(layers):
            mode = _TopKInterceptor(self, index)
            layer.register_forward_pre_hook(lambda *_, mode=mode: mode.enter())
            layer.register_forward_hook(lambda *_, mode=mode: mode.leave(), always_call=True)  # also after an error

    @staticmethod
    def of(model: PreTrainedModel) -> "Routers":
        """Return the model's routers, shared by engine and trainer. Raises ConfigError like the constructor."""
        routers = vars(model).get(ATTRIBUTE)
        if routers is None:
            routers = Routers(model)
            setattr(model, ATTRIBUTE, routers)
        assert isinstance(routers, Routers)
        return routers

    @contextmanager
    def recording(self, record: Record) -> Iterator[None]:
        """Stop replaying, and pass the routers' choices to `record`. ConfigError if none was made with `torch.topk`."""
        self._record, self._experts, self._has_recorded = record, None, False
        try:
            yield
        finally:
            self._record = None
        if not self._has_recorded:
            raise ConfigError(
                f"trainer.algorithm.router_replay=true is not supported for a {self._name}: its routers do not choose "
                "experts with torch.topk; set trainer.algorithm.router_replay=false"
            )

    def replay(self, experts: torch.Tensor | None, selected: torch.Tensor | None = None) -> None:
        """Use `experts` (T, layers, K) in all passes until the next call. With None, routers use their own choice.

        They also do so where an expert is `UNKNOWN_EXPERT`. `selected` (M,) has the indices of the tokens in a narrowed
        last layer.
        """
        self._experts, self._selected = experts, selected

    def count_next(self, uses: torch.Tensor, selected: torch.Tensor | None = None) -> None:
        """Count token t of the next forward pass `uses[t]` times (T,). Its backward pass counts nothing.

        `selected` is as in `replay`.
        """
        self._uses, self._selected, self._uncounted = uses, selected, set(range(self.n_layers))

    def observes(self, layer: int) -> bool:
        """Return True if the layer's choice is recorded, replayed or counted."""
        return self._record is not None or self._experts is not None or layer in self._uncounted

    def choose(self, layer: int, scores: torch.Tensor, own: torch.return_types.topk) -> torch.return_types.topk:
        """Return the choice of a layer's router, given its scores (T, E) and its own choice (T, K)."""
        if self._record is not None:
            self._record(layer, own.indices)
            self._has_recorded = True
        chosen, n_tokens = own, len(scores)
        if self._experts is not None:
            experts = self._select(self._experts[:, layer], n_tokens)  # (T, K)
            indices = torch.where(experts == UNKNOWN_EXPERT, own.indices, experts.long())
            chosen = torch.return_types.topk((scores.gather(-1, indices), indices))
        if self._counts is not None and layer in self._uncounted:
            self._uncounted.remove(layer)
            uses = self._select(self._uses, n_tokens)
            if len(uses) == n_tokens:  # else the architecture routes other tokens
                counts = self._counts.setdefault(layer, uses.new_zeros(self.n_experts))
                counts.index_add_(0, chosen.indices.flatten(), uses.repeat_interleave(self.n_chosen))
        return chosen

    def _select(self, values: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """Return the values (T, …) of the tokens that a layer computes: all, or the selected ones if it is narrowed."""
        return values[self._selected] if len(values) != n_tokens and self._selected is not None else values


def counting_routers(model: PreTrainedModel) -> Routers | None:
    """Return the model's routers inside `measuring_experts`, else None."""
    routers = vars(model).get(ATTRIBUTE)
    return routers if isinstance(routers, Routers) and routers._counts is not None else None


@contextmanager
def measuring_experts(model: PreTrainedModel, group: SequenceGroup | None = None) -> Iterator[Metrics]:
    """Yield metrics of the experts' load in the context's passes. They are added when it exits, if there are experts.

    The ranks of `group` divide the tokens.
    """
    metrics = Metrics()
    try:
        routers = Routers.of(model)
    except ConfigError:
        yield metrics
        return
    routers._counts = by_layer = dict[int, torch.Tensor]()
    try:
        yield metrics
    finally:
        routers._counts, routers._uncounted = None, set()
    if by_layer:
        counts = torch.stack(list(by_layer.values()))  # (layers, E)
        counts = (counts if group is None else sum_over_ranks(counts, group.process_group)).cpu()
        metrics |= {kind: Metric(kind, 0.0, counts.sum().item(), counts=counts) for kind in LOAD_METRICS}


class _TopKInterceptor(TorchFunctionMode):
    """A mode that intercepts a layer's `topk` call."""

    def __init__(self, routers: Routers, layer: int) -> None:
        super().__init__()
        self._routers = routers
        self._layer = layer
        self._n_entered = 0

    def enter(self) -> None:
        """Start intercepting, if the layer is observed."""
        if self._routers.observes(self._layer):
            self._n_entered += 1
            self.__enter__()

    def leave(self) -> None:
        """Stop intercepting."""
        if self._n_entered:
            self._n_entered -= 1
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        sizes = (scores.shape[-1], result.indices.shape[-1])
        if sizes != (self._routers.n_experts, self._routers.n_chosen):  # e.g. a choice of groups of experts
            return result
        flat = torch.return_types.topk((result.values.flatten(0, -2), result.indices.flatten(0, -2)))
        chosen = self._routers.choose(self._layer, scores.flatten(0, -2), flat)
        if chosen is flat:
            return result
        shape = result.indices.shape
        return torch.return_types.topk((chosen.values.view(shape), chosen.indices.view(shape)))
