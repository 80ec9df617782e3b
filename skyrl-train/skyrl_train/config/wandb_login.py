"""Check the login of Weights & Biases without importing it."""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

MODES_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")


def wandb_login_problem(environ: Mapping[str, str]) -> str | None:
    """Return None if there is a key, a `wandb login`, or a mode that needs neither; else a sentence on how to log in.

    Reads only `environ` and the netrc file.
    """
    mode = environ.get("WANDB_MODE", "").lower()
    if mode in MODES_WITHOUT_LOGIN or environ.get("WANDB_API_KEY") or _netrc_login(environ):
        return None
    return (
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
