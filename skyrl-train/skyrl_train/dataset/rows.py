"""Checks of prompt rows that run before any tokenizer or model is loaded. Imports neither torch nor transformers."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf

import skyrl_gym
from skyrl_gym.data.files import Row, quote
from skyrl_gym.data.images import FindTextModel, place_prompt_images
from skyrl_gym.envs.entry_point import suggest_name
from skyrl_gym.envs.registration import registry, validates_rows
from skyrl_gym.error import InvalidSettings, InvalidSpec, UnregisteredEnv
from skyrl_gym.runtime.packages import check_packages, find_fault
from skyrl_gym.runtime.text import describe_error
from skyrl_gym.runtime.validation import is_conversation
from skyrl_train.config.root import EnvironmentConfig
from skyrl_train.dataset.files import JoinedRows, reading_rows
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rendering.messages import check_media
from skyrl_train.types import PromptRow

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 400
WRITE_PROMPT = 'write [{"role": "user", "content": "…"}]'

LocatedRow = tuple[str, PromptRow]  # a row with its origin for messages, e.g. "row 17 of train.jsonl"


def read_prompt_rows(
    rows: JoinedRows,
    indices: Sequence[int],
    find_text_model: FindTextModel,
    prompt_key: str = "prompt",
    env_class_key: str = "env_class",
) -> Iterator[tuple[str, Row]]:
    """Yield (location, columns) of rows. `indices` must ascend. Images are in the prompt, but unread.

    Raises as `JoinedRows.read`, `check_row` and `place_images` do.
    """
    for location, row in rows.read(indices):
        check_row(row, location, prompt_key, env_class_key)
        with reading_rows():
            place_prompt_images(row, location, prompt_key, find_text_model)
        yield location, row


def check_row(row: Row, location: str, prompt_key: str = "prompt", env_class_key: str = "env_class") -> None:
    """Raise DataError for a row without a chat prompt or with an invalid `env_class`."""
    prompt = row.get(prompt_key)
    if prompt_key not in row:
        raise DataError(
            f"{location} has no {prompt_key!r}; its columns are {', '.join(row)}. A prompt is a list of messages: "
            f"{WRITE_PROMPT}"
        )
    if not isinstance(prompt, list) or not prompt:
        found = "null" if prompt is None else quote(prompt)
        raise DataError(
            f"{location}: {prompt_key}={found} is not a list of messages; {WRITE_PROMPT}, or remove the row"
        )
    for index, message in enumerate(prompt):
        if not is_conversation([message]) or (message["content"] is None and "tool_calls" not in message):
            raise DataError(
                f"{location}: message {index} of {prompt_key} lacks a role or a content: {quote(message)}; "
                f"{WRITE_PROMPT}"
            )
    # skip strings: environments may read them
    check_media({name: value for name, value in row.items() if not isinstance(value, str)}, location)
    env_class = row.get(env_class_key)
    if env_class is not None and not isinstance(env_class, str):
        raise DataError(
            f"{location}: {env_class_key}={quote(env_class)} is a {type(env_class).__name__}; write the name "
            "of an environment, or null for environment.env_class"
        )


def check_environments(
    rows: Iterable[LocatedRow], environment: EnvironmentConfig, max_turns: int, *, is_complete: bool = True
) -> None:
    """Check that each row's environment exists and accepts the row, and that all environment settings are used.

    Environments whose constructor only reads the row (`validates_rows`) are constructed once per row. Unused settings
    are reported only if the run has no other rows (`is_complete`).

    Raises:
        ConfigError: the default environment or a section of `environment.skyrl_gym` does not exist, or an environment's
            settings are invalid.
        DataError: a row's environment does not exist or rejects the row.
    """
    creators: dict[str, Any] = {}
    env_configs: dict[str, Any] = {}
    refused: list[tuple[str, str, str]] = []  # location, environment, reason
    uses_default, n_rows = False, 0
    for location, row in rows:
        n_rows += 1
        uses_default = uses_default or not row.env_class
        name = row.env_class or environment.env_class
        if name not in creators:
            creators[name] = _load_environment(row.env_class, location, environment)
            env_configs[name] = OmegaConf.create(environment.skyrl_gym.env_config(name))
        if (reason := _find_refusal(name, creators[name], row, env_configs[name], max_turns)) is not None:
            refused.append((location, name, reason))
    if refused:
        location, name, reason = refused[0]
        others = f"; {len(refused)} of {n_rows} rows are rejected" if len(refused) > 1 else ""
        raise DataError(f"{location}: the environment {name} rejects it: {reason}. Fix or remove the row{others}")
    if is_complete and n_rows:
        _check_settings(environment, list(creators), uses_default=uses_default)


def _load_environment(env_class: str | None, location: str, environment: EnvironmentConfig) -> Any:
    """Return the class or function of a row's environment, or None if only `environment.skyrl_gym.python` has it.

    Raise DataError if the row's environment is unknown, or ConfigError if the default environment is, or if the
    interpreter that runs it lacks a package.
    """
    name = env_class or environment.env_class
    origin = f"{location}: env_class" if env_class else "environment.env_class"
    python = environment.skyrl_gym.python
    try:
        spec = skyrl_gym.spec(name)
        is_path = isinstance(spec.entry_point, str)
        if python is not None and is_path and (fault := find_fault(python, str(spec.entry_point))):
            raise ConfigError(f"{origin}={name}: environment.skyrl_gym.python={python} cannot play it: {fault}")
        creator = spec.load()
        if python is None:
            check_packages(creator)
    except (UnregisteredEnv, InvalidSpec) as error:
        raise (DataError if env_class else ConfigError)(
            f"{origin}={name}: {error} Set environment.imports=[module:function] to register it."
        ) from error
    except ImportError as error:
        if python is not None:
            return None
        raise ConfigError(f"{origin}={name}: {error}") from error
    return creator


def _find_refusal(name: str, creator: Any, row: PromptRow, env_config: Any, max_turns: int) -> str | None:
    """Return why an environment rejects a row, or None if it accepts it."""
    if creator is None or not validates_rows(creator):
        return None
    try:
        skyrl_gym.make(name, env_config=env_config, extras={**row.env_extras, "max_turns": max_turns}).close()
    except ImportError as error:
        raise ConfigError(f"failed to create the environment {name}: {error}") from error
    except InvalidSettings as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # noqa: BLE001, constructors raise any error
        return describe_error(error)[:MAX_REASON_CHARS].rstrip(".")
    return None


def _check_settings(environment: EnvironmentConfig, used: list[str], *, uses_default: bool) -> None:
    """Reject sections for unknown environments, and warn of settings that no row uses."""
    default = type(environment).model_fields["env_class"].default
    if not uses_default and environment.env_class not in (*used, default):
        logger.warning(
            "environment.env_class=%s is ignored, because every row has an env_class (%s); remove it, or the column",
            *(environment.env_class, ", ".join(sorted(used))),
        )
    sections = {name.rpartition(":")[2] for name in used}
    for section in environment.skyrl_gym.model_extra or {}:
        if section in sections:
            continue
        key = f"environment.skyrl_gym.{section}"
        if section not in registry:
            hint = suggest_name(section, [*registry, *sections]) or f" The rows use {', '.join(sorted(sections))}."
            raise ConfigError(f"{key} is a section of an environment that does not exist.{hint}")
        logger.warning("%s is ignored, because no row has env_class=%s", key, section)
