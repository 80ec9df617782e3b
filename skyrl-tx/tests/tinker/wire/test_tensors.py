import numpy as np
import pytest

from tx.tinker.types import UserError
from tx.tinker.wire import tinker_pb2 as pb
from tx.tinker.wire.tensors import check_sparse, dense_array, tensor_from_json


def packed(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def sparse(values: bytes, rows: bytes, columns: bytes, shape: list[int]) -> pb.Tensor:
    csr = pb.SparseCsr(values=values, crow_indices=rows, col_indices=columns)
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64, shape=shape)


def test_empty_sparse_rows_are_zeros() -> None:
    tensor = sparse(packed(7, 8, 9), packed(0, 2, 2, 3), packed(0, 3, 1), [3, 4])
    assert dense_array(tensor, "t").tolist() == [[7, 0, 0, 8], [0] * 4, [0, 9, 0, 0]]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_BFLOAT16), "dtype DTYPE_BFLOAT16"),
        (pb.Tensor(dtype=pb.DTYPE_INT64), "no values"),
        (pb.Tensor(dense=b"1234567", dtype=pb.DTYPE_INT64), "7 bytes"),
        (pb.Tensor(dense=packed(1, 2), dtype=pb.DTYPE_INT64, shape=[3]), "2 numbers, but its shape"),
        (pb.Tensor(dense=packed(1), dtype=pb.DTYPE_INT64, shape=[1, 1, 1]), r"must be \[n\] or \[n, k\]"),
        (pb.Tensor(dense=packed(1), dtype=pb.DTYPE_INT64, shape=[-1]), "must be"),
        (sparse(packed(1), packed(0, 1), packed(0), [1]), "sparse"),
        (sparse(packed(1), packed(0, 1, 1), packed(0), [1, 4]), "3 crow_indices, and 1 rows need 2"),
        (sparse(packed(1), packed(1, 1), packed(0), [1, 4]), "must go up"),
        (sparse(packed(1), packed(0, 5, 1), packed(0), [2, 4]), "must go up"),
        (sparse(packed(1), packed(0, 1), packed(0, 1), [1, 4]), "2 col_indices for 1 values"),
        (sparse(packed(1), packed(0, 1), packed(4), [1, 4]), "from 0 to 3"),
        (sparse(packed(1), packed(0, 1), packed(-1), [1, 4]), "from 0 to 3"),
    ],
)
def test_inconsistent_tensors_are_refused_by_name(tensor: pb.Tensor, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        dense_array(tensor, "weights of data[3]")
    assert "weights of data[3]" in str(refused.value)


@pytest.mark.parametrize("fields", [{"data": [1 << 70]}, {"data": [1], "shape": [1 << 70]}])
def test_numbers_that_do_not_fit_in_json(fields: dict[str, object]) -> None:
    with pytest.raises(UserError, match="does not fit"):
        tensor_from_json({"dtype": "int64", **fields}, "t")


@pytest.mark.parametrize("shape", [[1, 1 << 23], [-1, 1 << 23], [1 << 40, 1 << 20]])
def test_large_sparse_tensors_are_refused(shape: list[int]) -> None:
    tensor = sparse(packed(1), packed(0, 1), packed(0), shape)
    with pytest.raises(UserError, match="numbers are more than 16777216; split the request"):
        check_sparse([tensor, tensor, sparse(packed(1), packed(0, 1), packed(0), [1, 4])])
    check_sparse([sparse(packed(1), packed(0, 1), packed(0), [1, 4]), pb.Tensor(dense=packed(1), shape=[1 << 40])])


def test_sparse_json() -> None:
    fields = {"data": [5.0], "dtype": "float32", "shape": [2, 2]}
    sparse = {"sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [1]}
    assert dense_array(tensor_from_json({**fields, **sparse}, "t"), "t").tolist() == [[0, 0], [0, 5]]
