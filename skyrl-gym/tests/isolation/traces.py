"""Processes and folders of the programs that this process started, apart from others on the machine."""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from skyrl_gym.isolation import program


@dataclass
class Traces:
    """Processes that carry the mark of this object, and their temporary folders."""

    mark: str = field(default_factory=lambda: f"test-{secrets.token_hex(8)}-")
    _folders: list[str] = field(default_factory=list)

    def processes(self) -> set[int]:
        """Return the processes that are still running."""
        environments = ((p.pid, p.info["environ"] or {}) for p in psutil.process_iter(["environ"]))
        return {pid for pid, environ in environments if environ.get(program.MARK, "").startswith(self.mark)}

    def folders(self) -> set[str]:
        """Return the folders that still exist."""
        return {folder for folder in self._folders if os.path.exists(folder)}

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Mark all programs that start from now on, and record their folders."""

        def mkdtemp(**options: Any) -> str:
            self._folders.append(tempfile.mkdtemp(**options))
            return self._folders[-1]

        token_hex = SimpleNamespace(token_hex=lambda n_bytes: self.mark + secrets.token_hex(n_bytes))
        monkeypatch.setattr(program, "secrets", token_hex)
        recorded = SimpleNamespace(mkdtemp=mkdtemp, TemporaryFile=tempfile.TemporaryFile)
        monkeypatch.setattr(program, "tempfile", recorded)
