"""Decode clients' arrays: packed or listed, dense or compressed sparse rows (CSR)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tx.tinker.types import UserError
from tx.tinker.wire import tinker_pb2 as pb

INT32_RANGE = (-(1 << 31), (1 << 31) - 1)
MAX_ELEMENTS = 1 << 24
"""Maximum elements of all sparse tensors in a message. A few bytes can declare a large shape."""

PACKED: Mapping[int, str] = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}
LISTED: Mapping[str, tuple[pb.DType, str]] = {"float32": (pb.DTYPE_FLOAT32, "<f4"), "int64": (pb.DTYPE_INT64, "<i8")}


def dense_array(tensor: pb.Tensor, name: str) -> np.ndarray:
    """Decode a tensor to its shape, or flat if it has none. Sparse tensors are filled with zeros.

    Raises:
        UserError: the dtype is not supported, or the size does not fit the shape. The message includes `name`.
    """
    packed = PACKED.get(tensor.dtype)
    if packed is None:
        dtype = pb.DType.Name(tensor.dtype) if tensor.dtype in pb.DType.values() else tensor.dtype
        raise UserError(f"{name} has dtype {dtype}, which must be float32 or int64")
    layout = tensor.WhichOneof("layout")
    if layout is None:
        raise UserError(f"{name} holds no values; give dense or sparse_csr")
    shape = tuple(tensor.shape)
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise UserError(f"{name} has shape {list(shape)}, which must be [n] or [n, k]")
    if layout == "sparse_csr":
        return _from_csr(tensor.sparse_csr, packed, shape, name)
    values = _unpack_numbers(tensor.dense, packed, name)
    if not tensor.shape:
        return values
    if values.size != math.prod(shape):
        raise UserError(f"{name} has {values.size} numbers, but its shape {list(shape)} needs {math.prod(shape)}")
    return values.reshape(shape)


def check_sparse(tensors: Iterable[pb.Tensor]) -> None:
    """Check that the sparse tensors of a message are small enough to densify.

    Raises:
        UserError: they are too large.
    """
    n_elements = sum(abs(math.prod(tensor.shape)) for tensor in tensors if tensor.WhichOneof("layout") == "sparse_csr")
    if n_elements > MAX_ELEMENTS:
        raise UserError(f"sparse tensors of {n_elements} numbers are more than {MAX_ELEMENTS}; split the request")


def _unpack_numbers(packed: bytes, dtype: str, name: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(packed) % size:
        raise UserError(f"{name} has {len(packed)} bytes; each number takes {size}")
    return np.frombuffer(packed, dtype)


def _from_csr(csr: pb.SparseCsr, dtype: str, shape: tuple[int, ...], name: str) -> np.ndarray:
    values = _unpack_numbers(csr.values, dtype, name)
    rows = _unpack_numbers(csr.crow_indices, "<i8", f"{name}.crow_indices")
    columns = _unpack_numbers(csr.col_indices, "<i8", f"{name}.col_indices")
    if len(shape) != 2:
        raise UserError(f"{name} is sparse and has shape {list(shape)}, which must be [n, k]")
    n_values = values.size
    if rows.size != shape[0] + 1:
        raise UserError(f"{name} has {rows.size} crow_indices, and {shape[0]} rows need {shape[0] + 1}")
    if rows[0] != 0 or rows[-1] != n_values or (rows[1:] < rows[:-1]).any():
        raise UserError(f"{name}.crow_indices must go up from 0 to {n_values}, the number of its values")
    if columns.size != n_values:
        raise UserError(f"{name} has {columns.size} col_indices for {n_values} values")
    if columns.size and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise UserError(f"{name}.col_indices must be from 0 to {shape[1] - 1}, the last column")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def tensor_from_json(fields: Mapping[str, Any], name: str) -> pb.Tensor:
    """Convert `{data, dtype, shape?, sparse_crow_indices?, sparse_col_indices?}`.

    Raises:
        UserError: a number does not fit the dtype.
    """
    dtype, packed = LISTED[fields["dtype"]]
    values = _parse_numbers(fields["data"], packed, name)
    tensor = pb.Tensor(dtype=dtype, shape=_parse_numbers(fields.get("shape") or [], "<i8", f"{name}.shape").tolist())
    rows, columns = fields.get("sparse_crow_indices"), fields.get("sparse_col_indices")
    if rows is None:
        tensor.dense = values.tobytes()
        return tensor
    tensor.sparse_csr.values = values.tobytes()
    tensor.sparse_csr.crow_indices = _parse_numbers(rows, "<i8", f"{name}.sparse_crow_indices").tobytes()
    tensor.sparse_csr.col_indices = _parse_numbers(columns or [], "<i8", f"{name}.sparse_col_indices").tobytes()
    return tensor


def _parse_numbers(values: Sequence[float], dtype: str, name: str) -> np.ndarray:
    try:
        exact = np.asarray(values, dtype=np.float64 if dtype == "<f4" else np.int64).reshape(-1)
        with np.errstate(over="ignore"):
            return exact.astype(dtype)
    except (OverflowError, ValueError, TypeError) as error:
        raise UserError(f"{name} holds a number that does not fit {dtype[1:]}: {error}") from error


def json_array(values: np.ndarray) -> dict[str, Any]:
    """Encode a float32 array for older clients."""
    return {"data": values.reshape(-1).tolist(), "dtype": "float32", "shape": list(values.shape)}
