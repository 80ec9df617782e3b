"""Compatibility with older SDKs. Clients send their version with each request."""

from __future__ import annotations

from collections.abc import Mapping

from tx.tinker.db_models import CheckpointKind

VERSION = "x-stainless-package-version"
FIRST_WITH_EXTERNAL = (0, 28)


def readable_kinds(headers: Mapping[str, str]) -> tuple[CheckpointKind, ...]:
    """Return the checkpoint kinds that a client can parse. Older clients reject a whole list for one unknown kind."""
    version = headers.get(VERSION, "").split(".")[:2]
    if all(part.isdecimal() for part in version) and tuple(map(int, version)) < FIRST_WITH_EXTERNAL:
        return CheckpointKind.TRAINING, CheckpointKind.SAMPLER
    return tuple(CheckpointKind)
