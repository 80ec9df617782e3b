"""What older SDKs cannot read, by the version that each of their requests tells."""

from __future__ import annotations

from collections.abc import Mapping

from tx.tinker.db_models import CheckpointKind

VERSION = "x-stainless-package-version"
FIRST_WITH_EXTERNAL = (0, 28)


def readable_kinds(headers: Mapping[str, str]) -> tuple[CheckpointKind, ...]:
    """Kinds of checkpoints that a client takes in a list: an older one refuses the whole list for one of a new kind."""
    version = headers.get(VERSION, "").split(".")[:2]
    if all(part.isdecimal() for part in version) and tuple(map(int, version)) < FIRST_WITH_EXTERNAL:
        return CheckpointKind.TRAINING, CheckpointKind.SAMPLER
    return tuple(CheckpointKind)
