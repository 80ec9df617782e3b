"""Resolve aliases: where a key is set in several spellings, find the setting that wins."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.aliases import ALIASES, SKYRL_WITHOUT_EFFECT, UNSUPPORTED, Alias
from skyrl_train.config.base import is_open, value_at
from skyrl_train.config.problems import FIELDS, Fields, leaves, show

logger = logging.getLogger(__name__)

Positions = Mapping[str, int]
"""Where each key was last set or deleted: 0 is a configuration file, n the n-th override of a command line."""


@dataclass(frozen=True)
class _Setting:
    """A value that a configuration file or a command line gives to a key, in one of its spellings."""

    text: str
    value: Any
    position: int
    alias: Alias | None = None
    """None: the key itself was set or deleted."""

    def winner(self, other: _Setting) -> _Setting | None:
        """Return the one of two settings that wins, None if they contradict each other.

        The last one wins, except among aliases: one that sets a single key wins over one that sets several, and options
        of different meanings contradict each other.
        """
        later = max(self, other, key=lambda setting: setting.position)
        if self.value == other.value:
            return later
        if self.alias is not None and other.alias is not None:
            if bool(self.alias.also) != bool(other.alias.also):
                return other if self.alias.also else self
            if not (self.alias.is_synonym and other.alias.is_synonym):
                return None
        return None if self.position == other.position else later


def apply_aliases(
    tree: dict[str, Any],
    aliases: Mapping[str, Alias] = ALIASES,
    without_effect: Mapping[str, str] = SKYRL_WITHOUT_EFFECT,
    fields: Fields = FIELDS,
    positions: Positions | None = None,
) -> list[str]:
    """Replace aliases inside a nested dict, in place, with a log line for each; return one sentence for each problem.

    With `positions`, the last of several spellings wins, and a key without a position has its default. Without them,
    two spellings of different values are a problem. A key that has its default then counts as not set, because a
    composed configuration has a value for every key.
    """
    problems: list[str] = []
    settings: dict[str, _Setting] = {}
    for old, alias in aliases.items():
        found, value = _pop(tree, old.split("."))
        if not found:
            continue
        if alias.only_if is not None and _get(tree, alias.only_if, fields) is not True:
            logger.warning("%s=%s is not read: %s is not true", old, show(value), alias.only_if)
            continue
        for key, new_value in alias.readings(value):
            for leaf, leaf_value in _leaves(key, new_value, fields):
                spelling = old + leaf.removeprefix(key)
                text = f"{spelling}={show(value if leaf == key else leaf_value)}"
                setting = _Setting(text, leaf_value, (positions or {}).get(spelling, 0), alias)
                rival = settings.get(leaf) or _find_setting(tree, leaf, fields, positions)
                problems += _resolve(tree, leaf, setting, rival, settings)
    for old, reason in without_effect.items():
        found, value = _pop(tree, old.split("."))
        if found:
            logger.warning("%s=%s has no effect: %s", old, show(value), reason)
    for old, (accepted, reason) in UNSUPPORTED.items():
        found, value = _pop(tree, old.split("."))
        if found and value not in accepted:
            problems.append(f"{old}={show(value)}: {reason}; remove the key")
    return problems


def _leaves(key: str, value: Any, fields: Fields) -> Iterator[tuple[str, Any]]:
    """Yield the keys that a value sets: the key, or those of the user's own below it."""
    if is_open(fields[key]) and isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}")
    else:
        yield key, value


def _find_setting(tree: Any, key: str, fields: Fields, positions: Positions | None) -> _Setting | None:
    """Return how a key was set or deleted in its own spelling, None if it was not."""
    try:
        value = value_at(tree, key)
        text = f"{key}={show(value)}"
    except KeyError:
        value, text = _default(key, fields), f"~{key}"
    if positions is None:
        return None if value == _default(key, fields) else _Setting(text, value, 0)
    return _Setting(text, value, positions[key]) if key in positions else None


def _resolve(
    tree: dict[str, Any], key: str, setting: _Setting, rival: _Setting | None, settings: dict[str, _Setting]
) -> Iterator[str]:
    """Record which of two settings of a key wins, and set the key to it; yield a sentence if neither does."""
    winner = setting if rival is None else setting.winner(rival)
    if rival is not None and winner is None:
        yield (
            f"{setting.text} means {key}={show(setting.value)}, but {rival.text} was set too; remove one of them"
            + ("" if setting.position == rival.position else f", or end the command with {key}=<value>")
        )
        return
    assert winner is not None
    settings[key] = winner
    if rival is not None and rival.value != setting.value:
        loser = rival if winner is setting else setting
        logger.warning("%s is overridden by %s", loser.text, winner.text)
    if winner.value == setting.value:
        logger.warning("%s is read as %s=%s", setting.text, key, show(setting.value))
        _put(tree, key.split("."), setting.value)


def _pop(tree: dict[str, Any], path: list[str]) -> tuple[bool, Any]:
    """Remove a value from nested dicts, with the dicts that this empties; return (False, None) if it is missing."""
    name, *rest = path
    if name not in tree:
        return False, None
    if not rest:
        return True, tree.pop(name)
    inner = tree[name]
    if not isinstance(inner, dict):
        return False, None
    result = _pop(inner, rest)
    if result[0] and not inner:
        del tree[name]
    return result


def _get(tree: Any, key: str, fields: Fields) -> Any:
    """Return the value of a key, or its default if the tree has none."""
    try:
        return value_at(tree, key)
    except KeyError:
        return _default(key, fields)


def _default(key: str, fields: Fields) -> Any:
    """Return the default of a key as in YAML; keys of the user's own have none."""
    default = fields[key].get_default() if key in fields else None
    return list(default) if isinstance(default, tuple) else default


def _put(tree: dict[str, Any], path: list[str], value: object) -> None:
    *parents, name = path
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            return  # validation refuses the value of this section
    tree[name] = value
