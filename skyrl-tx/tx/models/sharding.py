"""Sharding of a model over several devices.

Axis `tp` splits matrices where heads and hidden units are independent. Axis `fsdp` splits their other dimension, and
the rows of a micro-batch. The compiler inserts the communication.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tx.models.config import ModelError

T = TypeVar("T")
FSDP, TP = "fsdp", "tp"
COLUMNS = ("q", "k", "v", "gate", "up", "head")  # (…, in, out): split by outputs
ROWS = ("o", "down", "embed")  # (…, in, out): split by inputs


def mesh_of(n_fsdp: int, n_tp: int) -> Mesh:
    """Return a mesh of the first devices. 1 × 1 is a single device.

    Raises:
        ModelError: there are not enough devices.
    """
    devices = jax.devices()
    if n_fsdp * n_tp > len(devices):
        raise ModelError(
            f"fully_sharded_data_parallel_size={n_fsdp} × tensor_parallel_size={n_tp} needs {n_fsdp * n_tp} devices, "
            f"but there are {len(devices)} ({devices[0].platform})"
        )
    grid = np.asarray(devices[: n_fsdp * n_tp]).reshape(n_fsdp, n_tp)
    return Mesh(grid, (FSDP, TP), axis_types=(AxisType.Auto, AxisType.Auto))


def place_weight(mesh: Mesh, name: str, weight: jax.Array) -> jax.Array:
    """Shard a weight by its name in `Params`."""
    before = [None] * (weight.ndim - 2)
    if name in COLUMNS:
        return _place(mesh, weight, [*before, FSDP, TP])
    if name in ROWS:
        return _place(mesh, weight, [*before, TP, FSDP])
    return _place(mesh, weight, [])


def place_rows(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """Split a micro-batch's rows (M, …) among devices."""
    return _place(mesh, rows, [FSDP])


def place_heads(mesh: Mesh, cache: jax.Array) -> jax.Array:
    """Shard a cache (layers, pages, K, …) by heads."""
    return _place(mesh, cache, [None, None, TP])


def replicate(mesh: Mesh, tree: T) -> T:
    """Replicate arrays, e.g. an adapter's, on each device.

    The compiler distinguishes explicitly placed arrays from new ones, so without the placement it would compile
    programs twice.
    """
    placed: T = jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
    return placed


def _place(mesh: Mesh, array: jax.Array | np.ndarray, axes: Sequence[str | None]) -> jax.Array:
    """Shard an array. Axes that do not divide evenly are replicated."""
    even = [
        axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, array.shape[: len(axes)], strict=True)
    ]
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*even)))
