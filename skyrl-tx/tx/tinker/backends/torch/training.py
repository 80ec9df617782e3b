"""Forward and backward passes.

Each pass is computed by itself, in micro-batches that depend only on its data, so training gives bitwise the same
results alone and alongside other models.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from skyrl_train.media.spans import Spans
from skyrl_train.models.loading import checkpointed_layers
from skyrl_train.models.logprobs import CHUNK_LOGITS, hidden_states, lm_head_logits
from tx.tinker.backends.torch.images import to_spans
from tx.tinker.backends.torch.weights import Weights
from tx.tinker.losses import token_losses
from tx.tinker.types import Datum, Pass

XP = SimpleNamespace(
    exp=torch.exp, clip=torch.clamp, where=torch.where, sum=torch.sum, stop_gradient=torch.Tensor.detach
)

Gradients = list[torch.Tensor]


def add(total: Gradients, gradients: Gradients) -> Gradients:
    """Add gradients in place to the first argument."""
    for gradient, other in zip(total, gradients, strict=True):
        gradient += other
    return total


def micro_batches(data: Sequence[Datum], n_tokens: int) -> list[list[int]]:
    """Group data of equal target shapes and similar lengths into micro-batches of `n_tokens` tokens, padding included.

    A longer datum gets its own micro-batch.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for i in sorted(range(len(data)), key=lambda i: len(data[i].tokens)):
        alike.setdefault(data[i].inputs["target_tokens"].shape[1:], []).append(i)
    parts: list[list[int]] = []
    for indices in alike.values():
        part: list[int] = []
        for i in indices:  # the longest so far
            if not part or len(data[i].tokens) * (len(part) + 1) > n_tokens:
                part = []
                parts.append(part)
            part.append(i)
    return parts


def micro_batch(
    pass_: Pass, data: Sequence[Datum], weights: Weights
) -> tuple[np.ndarray, np.ndarray, Gradients | None]:
    """Return the targets' log-probs and losses (B, L, …), and the gradients."""
    tokens, mask, inputs = _pad(data, weights.model.device)
    loss_inputs = {name: tensor for name, tensor in inputs.items() if name != "target_tokens"}
    with torch.set_grad_enabled(not pass_.is_forward_only), weights.applied(), checkpointed_layers(weights.model):
        images = [to_spans(datum.images) for datum in data]
        lp = target_logprobs(weights.model, tokens, mask, inputs["target_tokens"], images)
        losses = token_losses(pass_.loss_fn, XP, lp, loss_inputs, pass_.settings)
        gradients = None
        if not pass_.is_forward_only:
            found = torch.autograd.grad(losses.sum(), weights.trained, materialize_grads=True)
            gradients = [gradient.float() for gradient in found]  # passes accumulate many gradients
    return lp.detach().cpu().numpy(), losses.detach().cpu().numpy(), gradients


def _pad(data: Sequence[Datum], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return tokens and mask (B, L), and inputs (B, L, …). Padding is 0, so it has weight 0."""
    length = max(len(datum.tokens) for datum in data)

    def pad(rows: Sequence[np.ndarray]) -> torch.Tensor:
        out = np.zeros((len(rows), length, *rows[0].shape[1:]), rows[0].dtype)
        for row, values in enumerate(rows):
            out[row, : len(values)] = values
        return torch.from_numpy(out).to(device)

    tokens = pad([datum.tokens for datum in data]).long()
    mask = pad([np.ones(len(datum.tokens), bool) for datum in data])
    return tokens, mask, {name: pad([datum.inputs[name] for datum in data]) for name in data[0].inputs}


def target_logprobs(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    targets: torch.Tensor,
    images: Sequence[Spans] | None = None,
) -> torch.Tensor:
    """Return log-probs of targets (B, L) or (B, L, K) given the tokens (B, L) up to their position, 0 outside the mask.

    Masked targets may be any number. `images` has the images of each row.
    """

    def score(hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        logits = lm_head_logits(model, hidden)  # (n, V)
        within = chosen.clamp(0, logits.shape[-1] - 1)
        return logits.gather(-1, within) - logits.logsumexp(dim=-1, keepdim=True)

    hidden = hidden_states(model, tokens, mask, images)[mask]  # (N, D)
    flat_targets = targets[mask].long().reshape(len(hidden), -1)  # (N, K)
    chunk = max(1, CHUNK_LOGITS // model.get_output_embeddings().weight.shape[0])
    if len(hidden) <= chunk:
        found = score(hidden, flat_targets)
    else:
        parts = zip(hidden.split(chunk), flat_targets.split(chunk), strict=True)
        found = torch.cat([checkpoint(score, *part, use_reentrant=False) for part in parts])
    out = found.new_zeros(targets.shape)
    out[mask] = found.reshape(-1, *targets.shape[2:])
    return out
