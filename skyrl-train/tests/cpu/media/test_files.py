"""Files of the images in trajectories."""

from pathlib import Path

import pytest
from train_kit.vision_models import picture

from skyrl_gym.images import read_image
from skyrl_report.run_folder import IMAGE_NAME, format_marker
from skyrl_train.media.files import write_images


def test_each_image_is_written_once(tmp_path: Path) -> None:
    first, second = (read_image(picture(seed)) for seed in range(2))
    write_images(tmp_path / "images", [first, second, first])
    paths = {image: tmp_path / "images" / image.file_name for image in (first, second)}
    assert sorted(paths.values()) == sorted((tmp_path / "images").iterdir())
    assert {image: read_image(path) for image, path in paths.items()} == {first: first, second: second}
    written = paths[first].stat().st_ino
    write_images(tmp_path / "images", [first])
    assert paths[first].stat().st_ino == written
    assert all(IMAGE_NAME.fullmatch(path.name) for path in paths.values())
    assert format_marker(first.file_name) == f"<|image:{first.digest[:8]}|>"


def test_an_incomplete_file_is_never_under_the_name_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = read_image(picture(0))

    def write_half(path: Path, content: bytes) -> None:
        path.write_text("half of the image")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        with pytest.raises(OSError, match="No space left"):
            write_images(tmp_path, [image])
    assert not (tmp_path / image.file_name).exists()
    write_images(tmp_path, [image])
    assert [path.name for path in tmp_path.iterdir()] == [image.file_name]


def test_without_images_there_is_no_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "images", [])
    assert list(tmp_path.iterdir()) == []
