import os
from pathlib import Path

from skyrl_gym.isolation.files import TOO_MANY_BYTES, clear_folder, file_bytes


def nest(folder: Path, depth: int) -> None:
    """Make folders inside each other whose path is too long for a call."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        for _ in range(depth):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
        Path("deep").write_bytes(bytes(1 << 20))
    finally:
        os.chdir(here)
        os.close(here)


def test_folder_of_any_depth_and_permissions_is_cleared(tmp_path: Path) -> None:
    nest(tmp_path, 2000)
    (tmp_path / "moved-0").mkdir()
    (tmp_path / "link").symlink_to("/usr")
    clear_folder(str(tmp_path))
    assert os.listdir(tmp_path) == []
    assert os.path.isdir("/usr/lib")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    for path in (tmp_path / "a" / "b", tmp_path / "a", tmp_path):
        path.chmod(0)
    clear_folder(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_size_of_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(1 << 20))
    with open(tmp_path / "deleted", "wb", buffering=0) as deleted:
        deleted.write(bytes(2 << 20))
        os.unlink(deleted.name)
        assert 1 << 20 <= file_bytes(str(tmp_path), [], 10) < 2 << 20
        assert 3 << 20 <= file_bytes(str(tmp_path), [os.getpid()], 10) < 4 << 20
    for i in range(11):
        (tmp_path / f"{i}").touch()
    assert file_bytes(str(tmp_path), [], 10) == TOO_MANY_BYTES
    clear_folder(str(tmp_path))
    nest(tmp_path, 30)
    assert file_bytes(str(tmp_path), [], 1000) == TOO_MANY_BYTES
    clear_folder(str(tmp_path))
