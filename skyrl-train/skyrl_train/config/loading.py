"""From what Hydra composed, or any nested mapping, to the typed configuration, and back to YAML."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from skyrl_train.config.aliases import apply_aliases
from skyrl_train.config.problems import config_error, from_validation_error, raise_problems, show
from skyrl_train.config.resolve import resolve
from skyrl_train.config.root import SkyRLConfig
from skyrl_train.config.validation import MACHINE_RULES, RULES, Rule, find_problems, find_warnings
from skyrl_train.errors import ConfigError

logger = logging.getLogger(__name__)

ConfigSource = DictConfig | Mapping[str, Any] | None


def load_config(source: ConfigSource = None) -> SkyRLConfig:
    """The typed configuration: other spellings read, types and rules checked, nulls that mean another key filled in.

    `source` holds any part of the keys, nested; what is missing takes its default. Raises one ConfigError that lists
    every problem. Depends on the source alone: what a run needs from the machine is checked by `validate_cfg`.
    """
    return _load(source, RULES)


def validate_cfg(cfg: SkyRLConfig | ConfigSource, extra_rules: tuple[Rule, ...] = ()) -> SkyRLConfig:
    """Check a configuration and what it needs from the machine (keys of trackers), and return it typed.

    Raises one ConfigError that lists every problem, those of `extra_rules` included.
    """
    rules = RULES + extra_rules + MACHINE_RULES
    if not isinstance(cfg, SkyRLConfig):
        return _load(cfg, rules)
    cfg = resolve(cfg)
    raise_problems(find_problems(cfg, rules))
    return cfg


def to_yaml(cfg: SkyRLConfig) -> str:
    """The configuration as YAML, filled-in values included; `load_config(yaml.safe_load(text))` gives it back.

    Characters beyond ASCII are escaped: PyYAML does not read all of them back as it writes them.
    """
    return str(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, width=1000))


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line for each key whose value differs between two dumped configurations: "trainer.epochs: 1 -> 2"."""
    lines = []
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changed_settings(old, new, f"{prefix}{name}.")
        elif old != new:
            lines.append(f"{prefix}{name}: {show(old)} -> {show(new)}")
    return lines


def _load(source: ConfigSource, rules: tuple[Rule, ...]) -> SkyRLConfig:
    tree = _as_tree(source)
    problems = apply_aliases(tree)
    try:
        cfg = resolve(SkyRLConfig.model_validate(tree))
    except ValidationError as error:
        raise config_error([*problems, *from_validation_error(error, tree)]) from None
    raise_problems([*problems, *find_problems(cfg, rules)])
    for sentence in find_warnings(cfg):
        logger.warning(sentence)
    return cfg


def _as_tree(source: ConfigSource) -> dict[str, Any]:
    """Plain nested dicts and lists, interpolations resolved; Hydra's own sections are none of ours."""
    if isinstance(source, DictConfig):
        try:
            source = OmegaConf.to_container(source, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{error.full_key}: {reason}; set {error.full_key}=<value>") from None
    if not isinstance(source, Mapping | None):
        raise ConfigError(f"the configuration is {show(source)}; it must be a mapping of sections")
    tree: dict[str, Any] = _plain(source or {})
    return {name: value for name, value in tree.items() if name not in ("hydra", "defaults")}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
