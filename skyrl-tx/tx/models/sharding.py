"""How a model lies on several devices, which compute as one.

Along `tp`, matrices are cut where heads and hidden units do not depend on each other; along `fsdp`, across, and the
rows of a micro-batch are divided. What a device has not is fetched when it is needed: the compiler sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tx.models.config import ModelError

T = TypeVar("T")
FSDP, TP = "fsdp", "tp"
COLUMNS = ("q", "k", "v", "gate", "up", "head")  # (…, in, out): each device has some of what comes out
ROWS = ("o", "down", "embed")  # (…, in, out): each device has some of what goes in


def mesh_of(n_fsdp: int, n_tp: int) -> Mesh:
    """The first devices there are, as a grid; one alone for 1 and 1.

    Raises:
        ModelError: there are not so many.
    """
    devices = jax.devices()
    if n_fsdp * n_tp > len(devices):
        raise ModelError(
            f"fully_sharded_data_parallel_size={n_fsdp} × tensor_parallel_size={n_tp} needs {n_fsdp * n_tp} devices, "
            f"and there are {len(devices)} ({devices[0].platform})"
        )
    grid = np.asarray(devices[: n_fsdp * n_tp]).reshape(n_fsdp, n_tp)
    return Mesh(grid, (FSDP, TP), axis_types=(AxisType.Auto, AxisType.Auto))


def place_weight(mesh: Mesh, name: str, weight: jax.Array) -> jax.Array:
    """A weight of `Params`, by its name there, where it belongs."""
    before = [None] * (weight.ndim - 2)
    if name in COLUMNS:
        return _place(mesh, weight, [*before, FSDP, TP])
    if name in ROWS:
        return _place(mesh, weight, [*before, TP, FSDP])
    return _place(mesh, weight, [])


def place_rows(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """Rows (M, …) of a micro-batch, divided among devices."""
    return _place(mesh, rows, [FSDP])


def place_heads(mesh: Mesh, cache: jax.Array) -> jax.Array:
    """A cache (layers, pages, K, …), each device with some of the heads."""
    return _place(mesh, cache, [None, None, TP])


def place_whole(mesh: Mesh, tree: T) -> T:
    """Arrays, of an adapter for instance, whole on each device.

    What lies there is also told apart by the compiler from what was just made, for which it would make its programs
    once more.
    """
    placed: T = jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
    return placed


def _place(mesh: Mesh, array: jax.Array | np.ndarray, axes: Sequence[str | None]) -> jax.Array:
    """What cannot be cut evenly is not cut."""
    even = [
        axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, array.shape[: len(axes)], strict=True)
    ]
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*even)))
