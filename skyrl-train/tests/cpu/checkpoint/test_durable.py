import pytest

from skyrl_train.checkpoint import disk_error


def test_the_error_of_the_disk_is_found_behind_that_of_a_writer() -> None:
    """PyTorch answers a full disk with "unexpected pos", raised while it handles the OSError."""

    class Writer:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("unexpected pos 704 vs 598")

    def write() -> None:
        with open("/dev/full", "wb", buffering=0) as full, Writer():
            full.write(b"content")

    with pytest.raises(RuntimeError, match="unexpected pos") as caught:
        write()
    assert str(disk_error(caught.value)) == "[Errno 28] No space left on device"
    unrelated = ValueError("not of the disk")
    assert disk_error(unrelated) is unrelated
