"""Keys whose null means "take it from another key": each is filled in when a configuration is loaded.

The filled-in values stay visible in the saved YAML. The order matters: a row may read what an earlier row filled in.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from skyrl_train.config.base import value_at, with_value
from skyrl_train.config.root import SkyRLConfig


def _max_input_length(cfg: SkyRLConfig) -> int | None:
    """Known without the model only when a trajectory is one turn."""
    return cfg.trainer.max_prompt_length if cfg.generator.max_turns == 1 else None


def _max_seq_len(cfg: SkyRLConfig) -> int | None:
    """Prompt plus response, where the input has a known limit."""
    n_input = cfg.generator.max_input_length
    return None if n_input is None else n_input + cfg.generator.sampling_params.max_generate_length


SOURCES: tuple[tuple[str, Callable[[SkyRLConfig], object]], ...] = (
    ("trainer.ref.model.path", lambda cfg: cfg.trainer.policy.model.path),
    ("trainer.ckpt_path", lambda cfg: f"{cfg.trainer.run_dir}/ckpts"),
    ("trainer.export_path", lambda cfg: f"{cfg.trainer.run_dir}/export"),
    ("trainer.algorithm.temperature", lambda cfg: cfg.generator.sampling_params.temperature),
    (
        "generator.eval_sampling_params.max_generate_length",
        lambda cfg: cfg.generator.sampling_params.max_generate_length,
    ),
    ("generator.max_input_length", _max_input_length),
    ("trainer.algorithm.max_seq_len", _max_seq_len),
)


PATHS = (
    "trainer.output_dir",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.resume_path",
    "trainer.policy.model.path",
    "trainer.critic.model.path",
    "trainer.ref.model.path",
)
"""Keys whose `~` and `$VARIABLES` are expanded; a Hub name has neither."""


def resolve(cfg: SkyRLConfig) -> SkyRLConfig:
    """A copy in which paths are expanded and every null of `SOURCES` whose source is known is filled in."""
    for key in PATHS:
        path = value_at(cfg, key)
        if path is not None:
            cfg = with_value(cfg, key, os.path.expandvars(os.path.expanduser(path)))
    for key, source in SOURCES:
        if value_at(cfg, key) is None:
            cfg = with_value(cfg, key, source(cfg))
    return cfg
