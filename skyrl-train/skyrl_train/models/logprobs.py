"""Log-probs of chosen tokens. The language-model head runs on trained positions only."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.media.spans import Spans
from skyrl_train.models.linear_head import linear_head_logits, linear_head_scores
from skyrl_train.models.prefix_sharing import PrefixTree, remove_padding, tree_hidden_states
from skyrl_train.models.routing import Routers, counting_routers
from skyrl_train.models.sequence_parallel import SequenceGroup, sum_over_ranks
from skyrl_train.models.vision import find_encoder
from skyrl_train.types import TokenScores

CHUNK_LOGITS = 1 << 25  # logits in memory at once, for heads that are more than a matrix: 128 MiB in float32


def response_logprobs(
    model: PreTrainedModel,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    temperature: float,
    *,
    entropy_grad: bool = False,
    shares_prefixes: bool = False,
    group: SequenceGroup | None = None,
    experts: torch.Tensor | None = None,
    images: Sequence[Spans] | None = None,
) -> TokenScores:
    """Return the scores of the tokens with `loss_mask` 1, each (B, R) and exactly 0 elsewhere.

    Args:
        model: a causal language model.
        sequences: (B, L) token ids, padded on either side.
        attention_mask: (B, L) 1 on tokens.
        loss_mask: (B, R) for the last R columns of `sequences`.
        temperature: divides the logits, as it did when the tokens were sampled.
        entropy_grad: make entropies differentiable, at a cost of two more values per logit.
        shares_prefixes: compute a prefix that several rows share once. Only without images.
        group: ranks that divide the tokens. All of them return the same scores. Needs `shares_prefixes`.
        experts: (B, L, layers, K) that compute each token, or -1.
        images: the images of each row, for a vision-language model.
    """
    predicted_from, mask = hidden_before(
        model, sequences, attention_mask, loss_mask, shares_prefixes, group, experts, images
    )  # (N, H), (B, R)
    token_ids = sequences[:, -loss_mask.shape[1] :][mask]  # (N,)
    chosen = chosen_logprobs(model, predicted_from, token_ids, temperature, entropy_grad)
    return TokenScores(*(on_mask(values, mask, group) for values in chosen))


def on_mask(values: torch.Tensor, mask: torch.Tensor, group: SequenceGroup | None) -> torch.Tensor:
    """Scatter values (N,) of the tokens on a mask into float32 (B, R), exactly 0 elsewhere, summed over `group`."""
    scattered = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values.float())
    return scattered if group is None else sum_over_ranks(scattered, group.process_group)


def hidden_before(
    model: PreTrainedModel,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    shares_prefixes: bool,
    group: SequenceGroup | None,
    experts: torch.Tensor | None = None,
    images: Sequence[Spans] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden state (N, H) that predicts each token with `loss_mask` 1, and the mask (B, R) of these tokens.

    States are in row-major order of the mask. With `group`, the mask has only the tokens whose states this rank has.
    """
    mask = loss_mask.bool()
    rows, positions = find_predictions(attention_mask, loss_mask)
    counting = counting_routers(model)
    if shares_prefixes:
        is_narrowed = group is None and sequences.device.type == "cpu"  # models/last_layer.py explains why
        selected = (rows, positions) if is_narrowed else None
        if (encoder := find_encoder(model)) is not None:
            sequences = encoder.as_text(sequences)
        tree = PrefixTree(remove_padding(sequences, attention_mask), sequences.device, selected)
        if experts is not None:
            Routers.of(model).replay(tree.merge_experts(experts[attention_mask.bool()]), tree.selected)
        index = tree.index[rows, positions]  # (N,)
        if counting is not None:
            uses = index.bincount(minlength=len(tree.token_ids))  # (U,)
            counting.count_next(uses if group is None else group.take_slice(uses), tree.selected)
        states = tree_hidden_states(model, tree, group)  # (M or u, H)
        if tree.selected is not None:
            index = torch.searchsorted(tree.selected, index)
        if group is not None:
            index = index - group.slice_start(len(tree.token_ids))
            is_own = (index >= 0) & (index < len(states))
            index, mask = index[is_own], mask.masked_scatter(mask, is_own)
        return states[index], mask
    if experts is not None:
        Routers.of(model).replay(align_left(experts, attention_mask).flatten(0, 1))
    if counting is not None:
        uses = pad(loss_mask.long(), (sequences.shape[1] - loss_mask.shape[1] - 1, 1))  # (B, L) of the token before
        counting.count_next(align_left(uses, attention_mask).flatten())
    return hidden_states(model, sequences, attention_mask, images)[rows, positions], mask


def find_predictions(attention_mask: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row (N,) of each token with `loss_mask` 1, and the position (N,) of the token before it.

    Positions count the tokens of a row, without its padding on the left.
    """
    rows, columns = loss_mask.nonzero(as_tuple=True)
    n_left_padding = attention_mask.long().argmax(dim=1)  # (B,)
    return rows, columns + attention_mask.shape[1] - loss_mask.shape[1] - n_left_padding[rows] - 1


def align_left(sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return `sequences` (B, L', …) with each row's tokens moved to the left, L' the longest row.

    The causal mask hides padding on the right from every token, so attention needs no mask and takes its fast path.
    """
    order = (1 - attention_mask.long()).argsort(dim=1, stable=True)  # (B, L): tokens first, in order
    length = int(attention_mask.sum(dim=1).max())
    rows = torch.arange(len(sequences), device=sequences.device)
    return sequences[rows[:, None], order[:, :length]]


def hidden_states(
    model: PreTrainedModel, sequences: torch.Tensor, attention_mask: torch.Tensor, images: Sequence[Spans] | None = None
) -> torch.Tensor:
    """Return final hidden states (B, L', H) of rows whose tokens are moved to the left, L' the longest row.

    Raise ConfigError if rows have images and the model reads only text.
    """
    compact = align_left(sequences, attention_mask)
    if (encoder := find_encoder(model)) is not None:
        arguments = encoder.arguments(compact, images or [[]] * len(compact))
        return model.base_model(**arguments, use_cache=False).last_hidden_state
    if any(images or ()):
        raise ConfigError(f"rows have images, but {model.name_or_path} reads only text; use a vision-language model")
    return model.base_model(input_ids=compact, use_cache=False).last_hidden_state


def chosen_logprobs(
    model: PreTrainedModel, hidden: torch.Tensor, token_ids: torch.Tensor, temperature: float, entropy_grad: bool
) -> TokenScores:
    """Return the scores of each token (N,), from the hidden states (N, H) that predict them.

    All logits (N, V) are never in memory at once. A head that is more than a matrix, e.g. with an adapter or capped
    logits, processes positions in chunks. The backward pass recomputes their logits.
    """
    head, config = model.get_output_embeddings(), model.config
    if _is_linear(head) and not getattr(config, "final_logit_softcapping", None):
        scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        return linear_head_scores(
            hidden, head.weight, head.bias, token_ids, scale / temperature, entropy_grad=entropy_grad
        )

    def score(hidden: torch.Tensor, token_ids: torch.Tensor) -> TokenScores:
        logprobs = (lm_head_logits(model, hidden) / temperature).log_softmax(dim=-1)  # (n, V)
        scored = logprobs if entropy_grad else logprobs.detach()
        probs = scored.exp()
        return TokenScores(
            logprobs=logprobs.gather(-1, token_ids[:, None])[:, 0],
            entropy=-(probs * scored).sum(dim=-1),
            sum_pi_squared=torch.linalg.vector_norm(probs.detach(), dim=-1).square(),
        )

    chunk_size = max(1, CHUNK_LOGITS // head.weight.shape[0])
    if len(token_ids) <= chunk_size:
        return score(hidden, token_ids)
    parts = [
        checkpoint(score, hidden_part, ids_part, use_reentrant=False)
        for hidden_part, ids_part in zip(hidden.split(chunk_size), token_ids.split(chunk_size), strict=True)
    ]
    return TokenScores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _is_linear(head: torch.nn.Module) -> bool:
    """Return True for a plain matrix. An adapter, for example, would add hooks."""
    return type(head) is torch.nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)


def lm_head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Return float32 logits (..., V), with the scaling that some architectures apply after the head.

    A plain linear head adds products in float32, even under bf16 autocast and with bf16 weights. Rounding a logit of 10
    to bf16 would move it by up to 0.03 nats, more than an update does.
    """
    head = model.get_output_embeddings()
    if _is_linear(head) and not torch.is_grad_enabled():
        logits = linear_head_logits(hidden.flatten(0, -2), head.weight, head.bias).view(*hidden.shape[:-1], -1)
        return scaled_logits(model, logits)
    dtype = next(head.parameters()).dtype
    with torch.autocast(hidden.device.type, enabled=False):
        if _is_linear(head) and dtype != torch.float32:
            bias = None if head.bias is None else head.bias.float()
            logits = torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)
        else:
            logits = head(hidden.to(dtype)).float()
    return scaled_logits(model, logits)


def scaled_logits(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """Apply the scaling that some architectures apply to the logits (..., V) of their head."""
    config = model.config
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scaling := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scaling
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = (logits / cap).tanh() * cap
    return logits
