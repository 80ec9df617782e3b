"""Metrics on Weights & Biases; the `wandb` package is imported only when this backend is asked for."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyrl_train.errors import ConfigError

_MODES_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")


class WandbTracker:
    """One wandb run, its files in `run_dir/wandb`. The `WANDB_*` variables of the environment apply.

    Raises `ConfigError` when there is no login, the package is not installed, or wandb cannot start the run.
    """

    def __init__(self, project_name: str, run_name: str, config: Mapping[str, Any], run_dir: Path) -> None:
        require_wandb_login(os.environ)
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "trainer.logger=wandb needs the wandb package: pip install 'skyrl-train[wandb]', "
                "or choose trainer.logger=tensorboard"
            ) from error
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(project=project_name, name=run_name, config=dict(config), dir=str(run_dir))
        except wandb.Error as error:
            raise ConfigError(
                f"wandb could not start the run {project_name}/{run_name}: {error}; "
                "check WANDB_API_KEY and the network, or export WANDB_MODE=offline"
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def truncate_after(self, step: int) -> None:
        """Uploaded steps stay: a resumed run is a wandb run of its own unless `WANDB_RUN_ID` says otherwise."""

    def close(self) -> None:
        self._run.finish()


def require_wandb_login(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless wandb could start: a key, a `wandb login` in the netrc file, or a mode without login.

    Reads only `environ` and the netrc file; does not import wandb, so it is cheap enough for a start-up check.
    """
    if environ.get("WANDB_MODE") in _MODES_WITHOUT_LOGIN or environ.get("WANDB_API_KEY") or _netrc_login(environ):
        return
    raise ConfigError(
        "trainer.logger=wandb needs a login, and the variable WANDB_API_KEY is not set; do one of: "
        "export WANDB_API_KEY=<your key>, run `wandb login`, export WANDB_MODE=offline (no upload), "
        "or choose trainer.logger=tensorboard"
    )


def _netrc_login(environ: Mapping[str, str]) -> bool:
    path = Path(environ.get("NETRC") or Path(environ.get("HOME", "")) / ".netrc")
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return path.is_file() and netrc.netrc(path).authenticators(host) is not None
    except netrc.NetrcParseError:
        return False
