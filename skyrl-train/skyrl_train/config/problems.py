"""Describe configuration problems, one sentence each: the key, its value, the allowed values, a fix."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from functools import reduce
from operator import getitem
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from skyrl_report.settings import leaves
from skyrl_train.config.base import FREE_VALUE, as_section, describe, describe_field, is_open, iter_fields, value_at
from skyrl_train.config.dialects import TASK_OPTIONS
from skyrl_train.config.root import SkyRLConfig
from skyrl_train.errors import ConfigError

Fields = Mapping[str, FieldInfo]
"""Every key of a configuration, sections included."""

FIELDS: Fields = dict(iter_fields(SkyRLConfig))
"""The keys of a reinforcement learning run."""

OPEN_SECTION = "environment.skyrl_gym"
"""The only section with free-form subsections: one per environment class."""

N_SUGGESTIONS = 3

Rule = Callable[[Any], Iterator[str]]
"""A function that yields one sentence per problem in a configuration."""


def config_error(problems: Iterable[str]) -> ConfigError:
    """Return one ConfigError that lists all problems."""
    sentences = list(dict.fromkeys(problems))
    if len(sentences) == 1:
        return ConfigError(sentences[0])
    lines = "".join(f"\n  - {sentence}" for sentence in sentences)
    return ConfigError(f"{len(sentences)} problems in the configuration:{lines}")


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one ConfigError that lists all problems, if any."""
    sentences = list(problems)
    if sentences:
        raise config_error(sentences)


def show(value: object) -> str:
    """Format a value as on the command line. Strings that would parse as another type keep their quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        is_another_type = value.lower() in ("null", "true", "false")
        with suppress(ValueError):
            float(value)
            is_another_type = True
        return value if value and value.isprintable() and not is_another_type else repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


def open_fields(fields: Fields) -> tuple[str, ...]:
    """Return the fields that accept user-defined keys, e.g. `trainer.algorithm.custom.tau=0.3`."""
    return tuple(key for key, field in fields.items() if is_open(field))


def nearest_keys(key: str, fields: Fields = FIELDS) -> list[str]:
    """Return up to three valid keys that an unknown key may stand for, the likeliest first.

    The order is: keys with the same last name in other sections, keys under a misspelt open field, misspelt keys of the
    same section. Without any of these, return a user-defined key in that section, or else any similar key.
    """
    if key in TASK_OPTIONS and "data.custom_cls.path" in fields:
        return [f"data.custom_cls.config.adapter_config.{key}"]
    parent, _, name = key.rpartition(".")
    valid = [known for known, field in fields.items() if as_section(field.annotation) is None]
    same_name = [known for known in valid if known.rpartition(".")[2] == name]
    same_name.sort(key=lambda known: -_similarity(key, known))
    in_open_field = []
    for field in open_fields(fields):
        names, depth = key.split("."), field.count(".") + 1
        if _similarity(".".join(names[:depth]), field) > 0.9:
            in_open_field.append(".".join([field, *names[depth:]]))
    likely = list(dict.fromkeys([*same_name, *in_open_field[:1], *_misspelt(key, valid, cutoff=0.75)]))
    if likely:
        return likely[:N_SUGGESTIONS]
    own_keys = [f"{field}.{name}" for field in open_fields(fields) if field.rpartition(".")[0] == parent]
    if own_keys:
        return [*_misspelt(key, valid, cutoff=0.6)[: N_SUGGESTIONS - 1], *own_keys]
    return get_close_matches(key, valid, n=N_SUGGESTIONS, cutoff=0.75)


def _misspelt(key: str, valid: list[str], cutoff: float) -> list[str]:
    """Return keys with a similar last name: first from the same section, then from its subsections."""
    parent, _, name = key.rpartition(".")
    below = [known for known in valid if known.startswith(f"{parent}.")]
    matches = get_close_matches(name, {known.rpartition(".")[2] for known in below}, cutoff=cutoff)
    found = [known for match in matches for known in below if known.rpartition(".")[2] == match]
    return sorted(found, key=lambda known: known.count("."))


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right).ratio()


def did_you_mean(key: str, fields: Fields = FIELDS) -> str:
    """Return the clause that suggests the nearest keys for an unknown key."""
    suggestions = nearest_keys(key, fields)
    return f"did you mean {' or '.join(suggestions)}?" if suggestions else "remove it"


def read_validation_error(
    error: ValidationError, tree: Mapping[str, Any], fields: Fields
) -> tuple[dict[str, str], set[tuple[str, ...]]]:
    """Return a sentence for each key of `tree` that pydantic rejected, by key, and the paths of the rejected values."""
    sentences: dict[str, str] = {}
    paths: set[tuple[str, ...]] = set()
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        location = tuple(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            paths.add(location)
            key, value = ".".join(location), reduce(getitem, location, tree)
            if any("." in name for name in location):
                section, *names = key.split(".")
                nested = f"{section}: {''.join(f'{{{name}: ' for name in names)}{show(value)}{'}' * len(names)}"
                sentences[key] = (
                    f"{key}={show(value)}: names in files and mappings have no dots; nest the sections: {nested}"
                )
            else:
                for leaf, inner in leaves(value, key):
                    sentences[leaf] = f"{leaf}={show(inner)}: there is no key {leaf}; {did_you_mean(leaf, fields)}"
        else:  # pydantic appends list indices and user-defined keys to the key of the field
            keys = [".".join(location[:n]) for n in range(len(location), 0, -1)]
            known = next(key for key in keys if key in fields)
            paths.add(tuple(known.split(".")))
            below = location[known.count(".") + 1 :]
            key, sentence = _wrong_value(known, below, value_at(tree, known), fields)
            sentences[key] = sentence
    return sentences, paths


def _wrong_value(known: str, below: Sequence[str], value: Any, fields: Fields) -> tuple[str, str]:
    """Return the key of a rejected value and the sentence for it. `below` are names of user-defined keys in `known`."""
    field = fields[known]
    if below and (known == OPEN_SECTION or is_open(field)):
        key, value = ".".join([known, *below]), reduce(getitem, below, value)
        if known == OPEN_SECTION and len(below) == 1:
            return key, (
                f"{key}={show(value)}: there is no key {key}; {did_you_mean(key, fields)} "
                f"(settings for an environment of class {below[0]} are a section: {key}.<name>=<value>)"
            )
        allowed = FREE_VALUE if known == OPEN_SECTION else describe(get_args(field.annotation)[1])
        return key, f"{key}={show(value)} must be {allowed}"
    problem = f"{known}={show(value)} must be {describe_field(field)}"
    if as_section(field.annotation) is not None:
        return known, f"{problem}; set its keys one by one: {known}.<name>=<value>"
    if value == "" and isinstance(field.get_default(), list):
        return known, f"{problem}; for none, write {known}=[]"
    return known, f"{problem}; the default is {known}={show(field.get_default())}"
