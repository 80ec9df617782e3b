"""Settings of the server and its engine. Each field is a flag of both, e.g. `--base-model` for `base_model`.

Secrets come from the environment or a file, never from the command line.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
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

from tx.flags import FlagParser, JsonObject, add_flag, flag, format_errors
from tx.tinker.backends.factory import BackendName, settings_of

DATABASE_URL, API_KEYS, EXTERNAL_KEY = "TX_DATABASE_URL", "TX_API_KEYS", "TX_EXTERNAL_INFERENCE_API_KEY"
NAMED_KEY = re.compile(r"(?!tml-|eyJ)([A-Za-z0-9_.-]{1,64})=(.+)", re.ASCII)
"""A key with its user's name. Keys themselves may contain "=", but start with tml- or eyJ."""
SECRET_FIELDS = frozenset({"database_url", "api_keys", "external_inference_api_key"})


def state_folder() -> Path:
    """Return the default folder for checkpoints.

    User data belongs there: it survives reboots and cache cleaning, and does not depend on the working directory.
    """
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "skyrl-tx"


def unnamed_user(key: str) -> str:
    """Return the user of an unnamed key."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _absolute_path(value: object) -> object:
    return Path(value).expanduser().absolute() if isinstance(value, str | Path) else value


Text = Annotated[str, MinLen(1)]
Folder = Annotated[Path, BeforeValidator(_absolute_path)]


class TxConfig(BaseModel):
    """Settings of the server and its engine."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    base_model: Text
    """The model to train and sample: a Hugging Face repository or a folder."""

    served_model_name: Text | None = None
    """The base model's name for clients. Defaults to `base_model`. Clients may also use `base_model`."""

    backend: BackendName = "jax"
    """The compute backend. torch supports more Hugging Face models and needs the extra skyrl-tx[torch]."""

    backend_config: JsonObject = Field(default_factory=dict)
    """Backend settings as JSON, e.g. '{"dtype": "bfloat16"}'."""

    checkpoints_base: Folder = Field(default_factory=state_folder)
    """Folder of checkpoints. The default is in $XDG_DATA_HOME, or ~/.local/share if that is unset."""

    min_free_bytes: Annotated[int, Ge(0)] = 1 << 30
    """Bytes to keep free on the disk of `checkpoints_base`. Writes that would leave less are rejected."""

    database_url: str = ""
    """SQLAlchemy URL of SQLite or PostgreSQL. Set TX_DATABASE_URL instead to hide a password. The default is
    `tinker.db` in `checkpoints_base`, so that checkpoints and their records stay together.
    """

    max_lora_rank: Annotated[int, Ge(1)] = 256
    """Maximum rank of an adapter."""

    train_all: bool = True
    """Accept rank 0: training of all parameters. Such a model takes four times the memory of the base model."""

    max_models: Annotated[int, Ge(1)] = 64
    """Maximum number of models under training. More are rejected until one is unloaded or its session ends."""

    max_models_per_user: Annotated[int, Ge(1)] | None = None
    """Maximum number of models per user. Unlimited by default."""

    max_sessions_per_user: Annotated[int, Ge(1)] = 1000
    """Maximum number of active sessions per user. More are rejected until one ends."""

    host: str = "127.0.0.1"
    """Address to listen on. Set API keys before you use 0.0.0.0: otherwise anyone may use the server."""

    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Port to listen on. 0 picks a free one."""

    root_path: str = ""
    """Path prefix that a reverse proxy strips, e.g. /tinker. Download addresses include it."""

    start_engine: bool = True
    """Start and supervise an engine. With --no-start-engine, run `python -m tx.tinker.engine` yourself."""

    engine_stop_sec: Annotated[float, Ge(0)] = 60
    """Seconds that a stopping server waits for the engine's current step. A second signal ends the wait."""

    engine_hang_sec: Annotated[float, Ge(-1)] = 1800
    """Seconds without progress after which the engine is restarted. Compiling counts as progress. -1 disables this."""

    api_keys_file: Folder | None = None
    """File of accepted API keys, one per line. TX_API_KEYS holds keys separated by commas. Without either, no key is
    needed. A line `alice=tml-...` names the user, who keeps all runs when the key is replaced. A user may have several
    keys. Without a name, the key itself is the user.
    """

    api_keys: tuple[SecretStr, ...] = ()
    """Accepted API keys, from `api_keys_file` and TX_API_KEYS."""

    session_timeout_sec: Annotated[float, Ge(-1)] = 300
    """Seconds without a request or heartbeat until a session ends and its models are unloaded. -1 disables this."""

    session_cleanup_interval_sec: Annotated[float, Gt(0)] = 60
    """Seconds between checks for stale sessions and expired checkpoints."""

    hold_sec: Annotated[float, Gt(0), Le(40)] = 25
    """Seconds that a client's poll waits for a result before the client must poll again. Clients time out after 45."""

    max_queued_requests: Annotated[int, Ge(1)] = 4096
    """Maximum number of pending requests per model or sampling session. Beyond it, clients are slowed down."""

    max_queued_bytes: Annotated[int, Ge(1)] = 4 << 30
    """Maximum bytes of these requests together."""

    max_queued_requests_per_user: Annotated[int, Ge(1)] = 4 * 4096
    """Maximum number of pending requests per user, over all models and sampling sessions."""

    max_queued_bytes_per_user: Annotated[int, Ge(1)] = 16 << 30
    """Maximum bytes of these requests together."""

    max_body_bytes: Annotated[int, Ge(1024)] = 256 << 20
    """Maximum size of a request body, decompressed."""

    compress_passes: bool = False
    """Ask clients to compress training data: worthwhile if the network is slower than zstd."""

    retention_sec: Annotated[float, Gt(0)] = 24 * 3600
    """Seconds that results can be fetched again before they are deleted."""

    snapshot_retention_sec: Annotated[float, Gt(0)] = 3600
    """Seconds without use after which unnamed samplers are deleted."""

    max_snapshots_per_session: Annotated[int, Ge(1)] = 32
    """Maximum number of unnamed samplers per session. Beyond it, the least recently used ones are deleted."""

    url_lifetime_sec: Annotated[float, Gt(0)] = 3600
    """Seconds that a download address of external weights is valid."""

    external_inference_url: str | None = None
    """URL of a server with the OpenAI API, e.g. vLLM, that does the sampling."""

    external_inference_api_key: SecretStr = SecretStr("EMPTY")
    """API key of that server, from TX_EXTERNAL_INFERENCE_API_KEY."""

    external_inference_answer_sec: Annotated[float, Gt(0)] = 3600
    """Timeout for that server's responses, in seconds."""

    external_inference_lora_base: Folder | None = None
    """Folder that the external server loads adapters from."""

    @field_validator("api_keys")
    @classmethod
    def _check_users(cls, api_keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        users: dict[str, str] = {}
        for user, key in map(_split_key, api_keys):
            if users.setdefault(key, user) != user:
                raise ValueError(f"users {users[key]} and {user} have the same API key; give each user a different one")
        return api_keys

    @field_validator("base_model")
    @classmethod
    def _check_folder(cls, base_model: str) -> str:
        if base_model.startswith(("/", "./", "../", "~")) and not Path(base_model).expanduser().is_dir():
            raise ValueError("the folder does not exist; use an existing folder or a Hugging Face repository")
        return base_model

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        settings_of(self.backend, self.backend_config)
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_database(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and not settings.get("database_url"):
            base = _absolute_path(settings.get("checkpoints_base") or state_folder())
            return {**settings, "database_url": f"sqlite:///{base}/tinker.db"}
        return settings

    @cached_property
    def users_by_key(self) -> dict[str, str]:
        """User of each API key."""
        return {key: user for user, key in map(_split_key, self.api_keys)}

    @property
    def model_name(self) -> str:
        """The base model's name for clients."""
        return self.served_model_name or self.base_model

    @property
    def tokenizer(self) -> str | None:
        """Tokenizer for clients: the repository, or a folder that only helps clients on this machine."""
        folder = Path(self.base_model).expanduser()
        where = str(folder.absolute()) if folder.is_dir() else self.base_model
        return None if ":" in where else where  # clients cut the name at a colon


def _split_key(entry: SecretStr) -> tuple[str, str]:
    """Split an entry of `api_keys` into its user and key."""
    text = entry.get_secret_value()
    named = NAMED_KEY.fullmatch(text)
    return (unnamed_user(text), text) if named is None else (named[1], named[2])


def parse_config(
    arguments: Sequence[str] | None = None, *, program: str, environment: Mapping[str, str] | None = None
) -> TxConfig:
    """Parse a command line. Exit with a message if a setting is invalid, or after `--help`."""
    parser = argument_parser(program)
    settings = parser.parse_flags(arguments)
    try:
        return TxConfig(**_secrets(settings, os.environ if environment is None else environment), **settings)
    except ValidationError as error:
        parser.error(format_errors(error))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def argument_parser(program: str) -> FlagParser:
    """Create a parser with a flag for each field that is not secret."""
    parser = FlagParser(prog=program, allow_abbrev=False)
    for name in TxConfig.model_fields:
        if name not in SECRET_FIELDS - {"database_url"}:
            add_flag(parser, TxConfig, name, *(["--engine"] if name == "start_engine" else []))
    return parser


def _secrets(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the secret fields from the environment and the key file."""
    lines = (
        Path(settings["api_keys_file"]).expanduser().read_text("utf-8").splitlines()
        if "api_keys_file" in settings
        else []
    )
    keys = [key.strip() for key in (*lines, *environment.get(API_KEYS, "").split(",")) if key.strip()]
    if not keys and ("api_keys_file" in settings or API_KEYS in environment):
        where = settings.get("api_keys_file", API_KEYS)
        raise ValueError(f"{where} has no key, and without keys anyone could use the server; add a key, or remove it")
    secrets: dict[str, Any] = {"api_keys": tuple(SecretStr(key) for key in keys)}
    if environment.get(EXTERNAL_KEY):
        secrets["external_inference_api_key"] = SecretStr(environment[EXTERNAL_KEY])
    if environment.get(DATABASE_URL) and "database_url" not in settings:
        secrets["database_url"] = environment[DATABASE_URL]
    return secrets


def arguments_of(config: TxConfig) -> list[str]:
    """Return a command line with the same settings, except for the settings in `environment_of`."""
    settings = config.model_dump(mode="json", exclude=set(SECRET_FIELDS) | {"api_keys_file", "start_engine"})
    arguments = []
    for name, value in settings.items():
        if isinstance(value, bool):
            arguments.append(flag(name if value else f"no_{name}"))
        elif value is not None:
            arguments.append(f"{flag(name)}={json.dumps(value) if isinstance(value, dict) else value}")
    return arguments


def environment_of(config: TxConfig) -> dict[str, str]:
    """Return the environment variables that carry the secrets to the engine."""
    return {DATABASE_URL: config.database_url, EXTERNAL_KEY: config.external_inference_api_key.get_secret_value()}
