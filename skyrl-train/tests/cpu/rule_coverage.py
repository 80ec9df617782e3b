"""Shared settings for tests of rules, and the coverage of the messages that a module of rules can yield."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from types import ModuleType

from omegaconf import OmegaConf

from skyrl_train.config.loading import RL, resolve
from skyrl_train.config.problems import Rule
from skyrl_train.config.root import SkyRLConfig

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
KL_IN_REWARD = [f"{ALGORITHM}.use_kl_loss=false", f"{ALGORITHM}.use_kl_in_reward=true"]
TEACHER = "trainer.ref.model.path=teacher"
ONE_SAMPLE = "generator.n_samples_per_prompt=1"
PARTS = {
    "tis_ratio_type": "sequence",
    "sequence_mask_metric": "product",
    "token_mask_is_threshold_low": 0.5,
    "token_mask_is_threshold_high": 2.0,
    "outlier_token_is_threshold_low": 0.1,
    "outlier_token_is_threshold_high": 10.0,
}
Case = tuple[list[str], str, list[list[str]]]  # overrides, their message, and similar overrides without a message


def estimator(name: str) -> str:
    return f"{ALGORITHM}.advantage_estimator={name}"


def loss(name: str) -> str:
    return f"{ALGORITHM}.policy_loss_type={name}"


def sentences_of(*modules: ModuleType, without: Iterable[str] = ()) -> set[tuple[str, int]]:
    """Return the files and lines of modules that yield a sentence, except in the functions named in `without`."""
    lines = set()
    for module in modules:
        functions = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef)]
        kept = [function for function in functions if function.name not in set(without)]
        yields = [node for function in kept for node in ast.walk(function) if isinstance(node, ast.Yield)]
        lines |= {(str(module.__file__), node.lineno) for node in yields}
    return lines


def sentences_seen(rules: Iterable[Rule], overrides: list[str]) -> set[tuple[str, int]]:
    """Return the files and lines that yield a sentence for a configuration."""
    cfg = resolve(SkyRLConfig.model_validate(OmegaConf.to_container(OmegaConf.from_dotlist(overrides))), RL)
    lines = set()
    for rule in rules:
        generator = rule(cfg)
        for _ in generator:
            innermost = generator
            while inspect.isgenerator(innermost.gi_yieldfrom):  # type: ignore[attr-defined]
                innermost = innermost.gi_yieldfrom  # type: ignore[attr-defined]
            lines.add((innermost.gi_code.co_filename, innermost.gi_frame.f_lineno))  # type: ignore[attr-defined]
    return lines
