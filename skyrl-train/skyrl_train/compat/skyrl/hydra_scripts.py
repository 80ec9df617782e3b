"""Functions for scripts with `@hydra.main`, under their names in `skyrl_train.config`."""

from collections.abc import Sequence

from omegaconf import DictConfig

from skyrl_train.config.cli import compose_config, is_of_hydra, is_override, parse_override, quote_home
from skyrl_train.config.problems import FIELDS, Fields, raise_problems
from skyrl_train.errors import ConfigError


def get_default_config() -> DictConfig:
    """Return the default configuration as Hydra composes it, to be changed and passed to `load_config`."""
    return compose_config([])


def rewrite_overrides(argv: Sequence[str], fields: Fields = FIELDS) -> list[str]:
    """Rewrite a command line so that Hydra accepts unknown keys, such as verl's. `load_config` reports them later.

    Unknown keys are marked as additions (`++key=value`). Flags, deletions and Hydra's own keys are not changed.

    Raises:
        ConfigError: lists all overrides that cannot be parsed.
    """
    overrides, problems = [], []
    for text in (quote_home(word) if is_override(word) else word for word in argv):
        try:
            override = parse_override(text) if is_override(text) else None
        except ConfigError as error:
            problems.append(str(error))
            continue
        if override is None or override.is_delete() or is_of_hydra(override):
            overrides.append(text)
        elif override.key_or_group in fields and not isinstance(override.value(), dict):
            overrides.append(text.lstrip("+"))
        else:  # unknown to Hydra, or a section that may contain user-defined keys
            overrides.append("++" + text.lstrip("+"))
    raise_problems(problems)
    return overrides
