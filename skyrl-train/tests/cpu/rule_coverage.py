"""Which sentences of a module of rules a test has seen, by the line of their `yield`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from types import ModuleType

from omegaconf import OmegaConf

from skyrl_train.config.problems import Rule
from skyrl_train.config.resolve import resolve
from skyrl_train.config.root import SkyRLConfig


def sentences_of(module: ModuleType, *, without: Iterable[str] = ()) -> set[int]:
    """Return the lines of a module that yield a sentence, but for the functions named in `without`."""
    functions = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef)]
    kept = [function for function in functions if function.name not in set(without)]
    return {node.lineno for function in kept for node in ast.walk(function) if isinstance(node, ast.Yield)}


def sentences_seen(rules: Iterable[Rule], overrides: list[str]) -> set[int]:
    """Return the lines that yield a sentence for a configuration."""
    cfg = resolve(SkyRLConfig.model_validate(OmegaConf.to_container(OmegaConf.from_dotlist(overrides))))
    lines = set()
    for rule in rules:
        generator = rule(cfg)
        for _ in generator:
            innermost = generator
            while inspect.isgenerator(innermost.gi_yieldfrom):  # type: ignore[attr-defined]
                innermost = innermost.gi_yieldfrom  # type: ignore[attr-defined]
            lines.add(innermost.gi_frame.f_lineno)  # type: ignore[attr-defined]
    return lines
