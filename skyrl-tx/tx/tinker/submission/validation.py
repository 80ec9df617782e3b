"""Validate requests before the engine sees them. Raise `UserError` if they are invalid.

The base model's limits are known once the engine is up. Before that, the engine checks them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tx.tinker.config import TxConfig
from tx.tinker.db_models import EngineState
from tx.tinker.losses import IGNORED_INPUTS, LOSSES, Loss
from tx.tinker.types import Datum, Pass, UserError
from tx.tinker.wire.sample_job import SampleJob

MULTI_TARGET = "cross_entropy"


def check_base_model(name: str, config: TxConfig) -> None:
    """Check that this server has the base model with this name or folder."""
    is_folder = name.startswith("/") and Path(name) == Path(config.base_model).expanduser().absolute()
    if name not in (config.model_name, config.base_model) and not is_folder:
        raise UserError(f"base_model={name!r} is not served here; this server has {config.model_name!r}")


def check_lora(rank: int, *, trains_any: bool, config: TxConfig, state: EngineState | None) -> None:
    """Check that the rank is supported and the adapter trains something."""
    if rank > config.max_lora_rank:
        raise UserError(f"lora_config.rank={rank} is more than the server's limit of {config.max_lora_rank}")
    if rank == 0 and state is not None and not state.can_train_all:
        raise UserError("lora_config.rank=0 trains all weights, which this backend cannot; use 1 or more")
    if rank == 0 and not config.train_all:
        raise UserError("lora_config.rank=0 trains all weights, which this server does not serve; use 1 or more")
    if rank > 0 and not trains_any:
        raise UserError("train_attn, train_mlp and train_unembed are all false; nothing would be trained")


def check_pass(pass_: Pass, state: EngineState | None) -> None:
    """Check the loss, its settings and the data against each other and the model."""
    loss = LOSSES.get(pass_.loss_fn)
    if loss is None:
        raise UserError(f"loss_fn={pass_.loss_fn!r} is not supported; use one of: {', '.join(LOSSES)}")
    _check_settings(pass_.loss_fn, loss, pass_.settings)
    if not pass_.data:
        raise UserError("data is empty; pass at least one datum")
    for number, datum in enumerate(pass_.data):
        _check_datum(datum, f"data[{number}]", pass_.loss_fn, loss)
        if state is not None:
            name = f"data[{number}].model_input"
            if len(datum.tokens) > state.max_context:
                raise UserError(f"{name} has {len(datum.tokens)} tokens; the maximum is {state.max_context}")
            check_tokens(datum.tokens, name, state)
            targets = datum.inputs["target_tokens"][_trained_mask(datum)]
            check_tokens(targets, f"data[{number}].loss_fn_inputs['target_tokens']", state)


def _check_settings(name: str, loss: Loss, settings: Mapping[str, float]) -> None:
    for key, value in settings.items():
        if key not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise UserError(f"loss_fn_config has {key!r}, which {name} does not support; it supports {known}")
        if not np.isfinite(value):
            raise UserError(f"loss_fn_config[{key!r}]={value} must be a finite number")
    merged = {**loss.settings, **settings}
    low, high = merged.get("clip_low_threshold", 0.0), merged.get("clip_high_threshold", 1.0)
    if low > high:
        raise UserError(f"clip_low_threshold={low} is more than clip_high_threshold={high}")


def _check_datum(datum: Datum, name: str, loss_name: str, loss: Loss) -> None:
    if not len(datum.tokens):
        raise UserError(f"{name}.model_input is empty; pass at least one token")
    for key in loss.needs:
        if key not in datum.inputs:
            raise UserError(f"{name}.loss_fn_inputs lacks {key!r}, which {loss_name} needs")
    for key in datum.inputs:
        if key not in IGNORED_INPUTS and key not in loss.inputs:
            known = ", ".join(loss.inputs)
            raise UserError(f"{name}.loss_fn_inputs has {key!r}, which no loss uses; {loss_name} uses {known}")
    used = replace(datum, inputs=loss.select_inputs(datum))
    _check_shapes(used, name, loss_name)
    _check_finite(used, name)


def _check_shapes(datum: Datum, name: str, loss_name: str) -> None:
    n_tokens, targets = len(datum.tokens), datum.inputs["target_tokens"].shape
    if len(targets) > 1 and loss_name != MULTI_TARGET:
        raise UserError(f"{name}: target_tokens has shape {list(targets)}, but {loss_name} takes one target per token")
    for key, value in datum.inputs.items():
        if value.shape[:1] != (n_tokens,):
            raise UserError(f"{name}: {key} has shape {list(value.shape)} for {n_tokens} tokens of model_input")
        if value.shape != targets:
            raise UserError(f"{name}: {key} has shape {list(value.shape)}, and target_tokens {list(targets)}")
    if 0 in targets:
        raise UserError(f"{name}: target_tokens has shape {list(targets)}; pass at least one target")


def _trained_mask(datum: Datum) -> np.ndarray:
    """Return the mask of targets with non-zero weight. Masked values may be anything."""
    weights = datum.inputs.get("weights")
    return np.ones(datum.inputs["target_tokens"].shape, bool) if weights is None else weights != 0


def _check_finite(datum: Datum, name: str) -> None:
    counted = _trained_mask(datum)
    for key, value in datum.inputs.items():
        wrong = ~np.isfinite(value) & (counted | (key == "weights"))
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            at = index[0] if len(index) == 1 else index
            raise UserError(f"{name}: {key}[{at}] is {value[index]}; it must be finite where the weight is not 0")


def check_tokens(tokens: np.ndarray | Sequence[int], name: str, state: EngineState) -> None:
    """Check that all tokens are in the vocabulary."""
    ids = np.asarray(tokens)
    wrong = (ids < 0) | (ids >= state.vocab_size)
    if wrong.any():
        raise UserError(f"{name} has token {ids[wrong][0]}; the vocabulary is 0 to {state.vocab_size - 1}")


def check_job(job: SampleJob, prompt: Sequence[int], state: EngineState) -> None:
    """Check that a job fits the model. `prompt` includes the tokens of images."""
    check_tokens(prompt, "prompt", state)
    check_tokens(job.stop_tokens or [], "stop", state)
    n_prompt = len(prompt)
    n_needed = n_prompt + (job.max_tokens or 1) - 1  # the last token is sampled but never read
    if n_needed > state.max_context:
        maximum = max(0, state.max_context - n_prompt + 1)
        raise UserError(
            f"a prompt of {n_prompt} tokens and max_tokens={job.max_tokens} exceed the model's {state.max_context} "
            f"positions; the maximum for this prompt is {maximum}"
        )
    if job.stop_strings and not state.has_tokenizer:
        raise UserError("stop has strings, but the model's folder has no tokenizer; use tokens")
    n_top = max(job.n_top_prompt, job.n_top_sampled)
    if n_top > state.vocab_size:
        raise UserError(f"{n_top} most likely tokens were requested, but the vocabulary has {state.vocab_size}")
