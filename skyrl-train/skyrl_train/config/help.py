"""Describe the keys of a configuration for `skyrl COMMAND --help`."""

import textwrap
from collections.abc import Sequence

from skyrl_train.config.base import as_section, describe_field
from skyrl_train.config.problems import Fields, did_you_mean, raise_problems, show

WIDTH = 100


def describe_sections(fields: Fields, command: str) -> str:
    """Return one line for each section of the configuration."""
    sections = {key: field for key, field in fields.items() if as_section(field.annotation)}
    width = max(map(len, sections)) + 2
    lines = [f"  {key:<{width}}{f'{field.description}'.split('. ')[0].rstrip('.')}" for key, field in sections.items()]
    return "\n".join([f"Sections (skyrl {command} --help SECTION lists the keys of one):", *lines])


def describe_keys(names: Sequence[str], fields: Fields) -> str:
    """Return default, allowed values and meaning of keys, and of all keys of sections.

    Raise ConfigError for an unknown key or section. The message suggests the nearest ones.
    """
    names = [name.partition("=")[0].rstrip(".") for name in names]
    raise_problems(
        f"there is no key or section {name}; {did_you_mean(name, fields)}" for name in names if name not in fields
    )
    texts = []
    for name in names:
        is_section = as_section(fields[name].annotation) is not None
        for key in [key for key in fields if key.rpartition(".")[0] == name] if is_section else [name]:
            field = fields[key]
            value = f"={show(field.get_default())}  {describe_field(field)}"
            meaning = textwrap.indent(textwrap.fill(f"{field.description}", WIDTH - 4), "    ")
            texts.append(f"{key}{'  (section)' if as_section(field.annotation) else value}\n{meaning}")
    return "\n\n".join(texts)
