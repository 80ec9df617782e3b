"""Resolve aliases, and pick the winner where a key is set in several spellings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from skyrl_report.settings import leaves
from skyrl_train.aliases import Alias
from skyrl_train.config.base import is_open, value_at
from skyrl_train.config.dialects import ALIASES, SKYRL_WITHOUT_EFFECT, UNSUPPORTED
from skyrl_train.config.problems import FIELDS, Fields, show

logger = logging.getLogger(__name__)

T = TypeVar("T")

Positions = Mapping[str, int]
"""Where each key was last set or deleted: 0 is the configuration file, n the n-th override on the command line."""


@dataclass(frozen=True)
class _Setting:
    """A value for a key from a configuration file or command line, in one of the key's spellings."""

    text: str
    value: Any
    position: int
    alias: Alias | None = None
    """None if the key itself was set or deleted."""

    @property
    def is_broad(self) -> bool:
        """True for an alias that sets several keys."""
        return self.alias is not None and bool(self.alias.also)

    def contradicts(self, other: _Setting) -> bool:
        """Return True if the values differ and neither setting overrides the other.

        Settings in one file have no order. Options with different meanings do not override each other. An alias that
        sets a single key overrides an alias that sets several.
        """
        if self.value == other.value:
            return False
        if self.alias is not None and other.alias is not None:
            if self.is_broad != other.is_broad:
                return False
            if not (self.alias.is_synonym and other.alias.is_synonym):
                return True
        return self.position == other.position


def apply_aliases(
    tree: dict[str, Any],
    aliases: Mapping[str, Alias] = ALIASES,
    without_effect: Mapping[str, str] = SKYRL_WITHOUT_EFFECT,
    fields: Fields = FIELDS,
    positions: Positions | None = None,
) -> list[str]:
    """Replace aliases in a nested dict in place. Log each one, and return a sentence for each problem.

    With `positions`, the last of several spellings wins, and a key without a position has its default. Without
    `positions`, two spellings with different values are a problem. A key with its default value then counts as not set,
    because a composed configuration has a value for every key.
    """
    problems: list[str] = []
    settings: dict[str, list[_Setting]] = {}
    for old, alias, value in _pop_all(tree, aliases):
        if alias.only_if is not None:
            problems += _resolve(tree, alias.only_if, settings.pop(alias.only_if, []))
            if value_at(tree, alias.only_if, _default(alias.only_if, fields)) is not True:
                logger.warning("%s=%s is not read: %s is not true", old, show(value), alias.only_if)
                continue
        readings = list(_read_alias(old, alias, value, fields, positions or {}))
        if not readings:
            logger.warning("%s=%s has no effect: %s keeps its value", old, show(value), alias.key)
        for key, setting in readings:
            settings.setdefault(key, _own_settings(tree, key, fields, positions)).append(setting)
    for key, of_key in settings.items():
        problems += _resolve(tree, key, of_key)
    for old, reason, value in _pop_all(tree, without_effect):
        logger.warning("%s=%s has no effect: %s", old, show(value), reason)
    for old, (accepted, reason), value in _pop_all(tree, UNSUPPORTED):
        if value not in accepted:
            problems.append(f"{old}={show(value)}: {reason}; remove the key")
    return problems


def _read_alias(
    old: str, alias: Alias, value: Any, fields: Fields, positions: Positions
) -> Iterator[tuple[str, _Setting]]:
    """Yield each key that an alias sets, with its setting. User-defined sections are set key by key."""
    for key, new_value in alias.readings(value):
        if is_open(fields[key]) and isinstance(new_value, Mapping):
            inner = [leaf for name, below in new_value.items() for leaf in leaves(below, f"{key}.{name}")]
        else:
            inner = [(key, new_value)]
        for leaf, leaf_value in inner:
            spelling = old + leaf.removeprefix(key)
            text = f"{spelling}={show(value if leaf == key else leaf_value)}"
            yield leaf, _Setting(text, leaf_value, positions.get(spelling, 0), alias)


def _own_settings(tree: Any, key: str, fields: Fields, positions: Positions | None) -> list[_Setting]:
    """Return the setting of a key in its own spelling, or [] if it was neither set nor deleted."""
    try:
        value = value_at(tree, key)
        text = f"{key}={show(value)}"
    except KeyError:
        value, text = _default(key, fields), f"~{key}"
    if positions is None:
        return [] if value == _default(key, fields) else [_Setting(text, value, 0)]
    return [_Setting(text, value, positions[key])] if key in positions else []


def _resolve(tree: dict[str, Any], key: str, settings: list[_Setting]) -> Iterator[str]:
    """Set a key to the last of its settings. Yield a sentence for each setting that contradicts it.

    A broad alias counts only if no narrow alias sets the key.
    """
    if not settings:
        return
    narrow = [setting for setting in settings if not setting.is_broad]
    candidates = narrow if any(setting.alias is not None for setting in narrow) else settings
    winner = max(candidates, key=lambda setting: setting.position)
    for setting in settings:
        if setting.contradicts(winner):
            first, second = sorted((setting, winner), key=settings.index)
            fix = "" if first.position == second.position else f", or end the command with {key}=<value>"
            yield (
                f"{second.text} means {key}={show(second.value)}, but {first.text} was set too; remove one of them{fix}"
            )
        elif setting.value != winner.value:
            logger.warning("%s is overridden by %s", setting.text, winner.text)
        elif setting.alias is not None:
            logger.warning("%s is read as %s=%s", setting.text, key, show(setting.value))
    if winner.alias is not None:
        *parents, name = key.split(".")
        for parent in parents:
            tree = tree.setdefault(parent, {})
            if not isinstance(tree, dict):
                return  # validation rejects the value of this section
        tree[name] = winner.value


def _pop_all(tree: dict[str, Any], table: Mapping[str, T]) -> Iterator[tuple[str, T, Any]]:
    """Remove a table's keys from nested dicts, and dicts that this leaves empty. Yield (key, table entry, value)."""
    for key, entry in table.items():
        *parents, name = key.split(".")
        sections: list[Any] = [tree]
        for parent in parents:
            sections.append(sections[-1].get(parent) if isinstance(sections[-1], dict) else None)
        if not isinstance(sections[-1], dict) or name not in sections[-1]:
            continue
        value = sections[-1].pop(name)
        for section, parent in zip(reversed(sections[:-1]), reversed(parents), strict=True):
            if not section[parent]:
                del section[parent]
        yield key, entry, value


def _default(key: str, fields: Fields) -> Any:
    """Return the default of a key in YAML types, or None for user-defined keys."""
    default = fields[key].get_default() if key in fields else None
    return list(default) if isinstance(default, tuple) else default
