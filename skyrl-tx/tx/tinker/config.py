"""The settings of the server and of its engine; each field is a flag of both, `--base-model` for `base_model`.

What is secret is read from the environment or from a file, and never stands on a command line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from tx.flags import JsonObject, add_flag, flag, problems_of
from tx.tinker.backends.factory import BackendName, settings_of

DATABASE_URL, API_KEYS, EXTERNAL_KEY = "TX_DATABASE_URL", "TX_API_KEYS", "TX_EXTERNAL_INFERENCE_API_KEY"
SECRET_FIELDS = frozenset({"database_url", "api_keys", "external_inference_api_key"})


def state_folder() -> Path:
    """Where checkpoints are kept unless told otherwise: where a user's data belongs, which outlasts restarts, the
    cleaning of caches and of temporary folders, and is found again from whatever folder the server is started.
    """
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "skyrl-tx"


def _whole_path(value: object) -> object:
    return Path(value).expanduser().absolute() if isinstance(value, str | Path) else value


Text = Annotated[str, MinLen(1)]
Folder = Annotated[Path, BeforeValidator(_whole_path)]


class NoKeysError(Exception):
    """Keys are asked for, and there are none."""


class TxConfig(BaseModel):
    """All settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    base_model: Text
    """The model to train and to sample from: the name of a Hugging Face repository, or a folder."""

    served_model_name: Text | None = None
    """What clients call the base model; without it, what `base_model` says. They may say `base_model`, too."""

    backend: BackendName = "jax"
    """What computes; torch takes more models of Hugging Face, and needs the extra skyrl-tx[torch]."""

    backend_config: JsonObject = Field(default_factory=dict)
    """The backend's own settings, as JSON, e.g. '{"dtype": "bfloat16"}'."""

    checkpoints_base: Folder = Field(default_factory=state_folder)
    """The folder of checkpoints. The default is in $XDG_DATA_HOME, ~/.local/share where that is unset."""

    database_url: str = ""
    """Of SQLAlchemy, for SQLite or PostgreSQL; from TX_DATABASE_URL as well, which hides a password. Without it,
    `tinker.db` in `checkpoints_base`, so that checkpoints and what is known of them stay together."""

    max_lora_rank: Annotated[int, Ge(1)] = 256
    """The largest rank of an adapter."""

    train_all: bool = True
    """Whether rank 0 is served, which trains all parameters: such a model takes four times the base model's memory."""

    max_models: Annotated[int, Ge(1)] = 64
    """Models under training at once; more are refused until one is unloaded or its session ends."""

    max_models_per_user: Annotated[int, Ge(1)] | None = None
    """Of those, models of one API key; no limit of its own by default."""

    host: str = "127.0.0.1"
    """The address to listen at. Before it is 0.0.0.0, give API keys: else all may use it."""

    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """The port to listen at; 0 takes a free one."""

    root_path: str = ""
    """What a proxy before the server takes off the path, e.g. /tinker: download addresses have it."""

    start_engine: bool = True
    """Whether the server starts an engine and looks after it; without, start `python -m tx.tinker.engine` yourself."""

    api_keys_file: Folder | None = None
    """A file of keys that clients may have, one a line; TX_API_KEYS has them with commas. None of both: no check."""

    api_keys: tuple[SecretStr, ...] = ()
    """The keys themselves; from `api_keys_file` and TX_API_KEYS."""

    session_timeout_sec: Annotated[float, Ge(-1)] = 300
    """A session that was not heard of for so long ends, and its models are unloaded; -1: never."""

    session_cleanup_interval_sec: Annotated[float, Gt(0)] = 60
    """How often to look for sessions and checkpoints whose time is over."""

    hold_sec: Annotated[float, Gt(0), Le(40)] = 25
    """How long a client's poll waits for a result before it is told to ask again; clients give up after 45."""

    max_queued_requests: Annotated[int, Ge(1)] = 4096
    """Requests of one model or sampling session that wait for their result; a client that sends more is slowed down."""

    max_queued_bytes: Annotated[int, Ge(1)] = 4 << 30
    """What those requests may hold together."""

    max_body_bytes: Annotated[int, Ge(1024)] = 256 << 20
    """The largest body of a request, decompressed."""

    compress_passes: bool = False
    """Whether clients are to compress what they send to train on: worth it where the network is slower than zstd."""

    retention_sec: Annotated[float, Gt(0)] = 24 * 3600
    """For how long a result can be asked for again, and a sampler without a name may be unused; then it is deleted."""

    url_lifetime_sec: Annotated[float, Gt(0)] = 3600
    """For how long a download address of external weights is good."""

    external_inference_url: str | None = None
    """Of a server with the OpenAI interface, e.g. vLLM, to sample there."""

    external_inference_api_key: SecretStr = SecretStr("EMPTY")
    """For that server; from TX_EXTERNAL_INFERENCE_API_KEY."""

    external_inference_answer_sec: Annotated[float, Gt(0)] = 3600
    """How long that server may take for an answer."""

    external_inference_lora_base: Folder | None = None
    """The folder where that server finds adapters."""

    @field_validator("base_model")
    @classmethod
    def _is_there(cls, base_model: str) -> str:
        if base_model.startswith(("/", "./", "../", "~")) and not Path(base_model).expanduser().is_dir():
            raise ValueError("there is no such folder; give one, or the name of a Hugging Face repository")
        return base_model

    @model_validator(mode="after")
    def _fits_backend(self) -> Self:
        settings_of(self.backend, self.backend_config)
        return self

    @model_validator(mode="before")
    @classmethod
    def _with_database(cls, told: Any) -> Any:
        if isinstance(told, Mapping) and not told.get("database_url"):
            base = _whole_path(told.get("checkpoints_base") or state_folder())
            return {**told, "database_url": f"sqlite:///{base}/tinker.db"}
        return told

    @property
    def model_name(self) -> str:
        """What clients call the base model."""
        return self.served_model_name or self.base_model

    @property
    def tokenizer(self) -> str | None:
        """Where clients find it: the repository, or the folder, which is of use on this machine only."""
        folder = Path(self.base_model).expanduser()
        where = str(folder.absolute()) if folder.is_dir() else self.base_model
        return None if ":" in where else where  # clients cut it there


def parse_config(
    arguments: Sequence[str] | None = None, *, program: str, environment: Mapping[str, str] | None = None
) -> TxConfig:
    """The settings of a command line; ends the process with a message if they are wrong, or `--help` is asked."""
    parser = argument_parser(program)
    return config_of(parser, parser.parse_args(arguments), os.environ if environment is None else environment)


def config_of(parser: argparse.ArgumentParser, parsed: argparse.Namespace, environment: Mapping[str, str]) -> TxConfig:
    """The settings of a command line that `argument_parser` has parsed, and that may have more."""
    told = {name: getattr(parsed, name) for name in TxConfig.model_fields if hasattr(parsed, name)}
    try:
        return TxConfig(**_secrets(told, environment), **told)
    except ValidationError as error:
        parser.error(problems_of(error))
    except (OSError, json.JSONDecodeError, NoKeysError) as error:
        parser.error(str(error))


def argument_parser(program: str) -> argparse.ArgumentParser:
    """A flag for each field that is not secret, and `--no-…` for what is switched on."""
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    for name in TxConfig.model_fields:
        if name not in SECRET_FIELDS - {"database_url"}:
            add_flag(parser, TxConfig, name, *(["--engine"] if name == "start_engine" else []))
    return parser


def _secrets(told: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields that the environment and the file of keys tell."""
    lines = Path(told["api_keys_file"]).expanduser().read_text("utf-8").splitlines() if "api_keys_file" in told else []
    keys = [key.strip() for key in (*lines, *environment.get(API_KEYS, "").split(",")) if key.strip()]
    if not keys and ("api_keys_file" in told or API_KEYS in environment):
        where = told.get("api_keys_file", API_KEYS)
        raise NoKeysError(
            f"{where} has no key, and without any, everybody may use the server; give one, or leave it out"
        )
    secrets: dict[str, Any] = {"api_keys": tuple(SecretStr(key) for key in keys)}
    if environment.get(EXTERNAL_KEY):
        secrets["external_inference_api_key"] = SecretStr(environment[EXTERNAL_KEY])
    if environment.get(DATABASE_URL) and "database_url" not in told:
        secrets["database_url"] = environment[DATABASE_URL]
    return secrets


def arguments_of(config: TxConfig) -> list[str]:
    """A command line with the same settings, but for the secrets, which `environment_of` has."""
    told = config.model_dump(mode="json", exclude=set(SECRET_FIELDS) | {"api_keys_file", "start_engine"})
    return [_argument(name, value) for name, value in told.items() if value is not None]


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)}={json.dumps(value) if isinstance(value, dict) else value}"


def environment_of(config: TxConfig) -> dict[str, str]:
    """The variables that tell the engine what no command line may say."""
    return {
        DATABASE_URL: config.database_url,
        EXTERNAL_KEY: config.external_inference_api_key.get_secret_value(),
    }
