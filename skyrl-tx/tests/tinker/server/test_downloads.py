import io
import stat
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tx.tinker.refusal import RefusalError
from tx.tinker.server.downloads import KEY_SIZE, Download, files_of, sign, signing_key, tar_parts, verify

KEY = b"k" * KEY_SIZE
LATER = int(time.time()) + 10**6


@given(st.text(), st.text())
def test_an_address_contains_its_permission(path: str, file: str) -> None:
    download = Download(path, file, LATER)
    assert verify(sign(download, KEY), KEY) == download


@given(st.data())
def test_a_modified_address_is_refused(data: st.DataObject) -> None:
    token = sign(Download("tinker://a:train:0/weights/x", "file", LATER), KEY)
    place = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.sampled_from("abcXYZ019._-%é\0").filter(lambda one: one != token[place]))
    with pytest.raises(RefusalError, match="is not signed by this server") as refused:
        verify(token[:place] + other + token[place + 1 :], KEY)
    assert refused.value.status == 403


def test_foreign_and_expired_addresses() -> None:
    with pytest.raises(RefusalError, match="is not signed"):
        verify(sign(Download("p", "f", LATER), b"other"), KEY)
    with pytest.raises(RefusalError, match="this address has expired"):
        verify(sign(Download("p", "f", int(time.time()) - 1), KEY), KEY)


def test_the_key_is_created_once(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: signing_key(folder), range(16)))
    assert keys == {signing_key(folder)}
    assert len(keys.pop()) == KEY_SIZE
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert signing_key(tmp_path / "other") != signing_key(folder)


def test_a_truncated_key_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "download_key").write_bytes(b"half")
    assert len(signing_key(tmp_path)) == KEY_SIZE
    assert signing_key(tmp_path) == signing_key(tmp_path)


def test_a_tar_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    contents = {"empty": b"", "block": bytes(512), "deep/large": bytes(range(256)) * 9000}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with tarfile.open(fileobj=io.BytesIO(b"".join(tar_parts(tmp_path)))) as tar:
        found = {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    assert found == contents
    assert [file.relative_to(tmp_path).as_posix() for file in files_of(tmp_path)] == sorted(contents)
    assert max(len(part) for part in tar_parts(tmp_path)) <= 1 << 20
