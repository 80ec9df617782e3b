"""Small checkpoints whose files contain the name of the save that wrote them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from skyrl_train.checkpoint import CheckpointStore
from skyrl_train.checkpoint.manifest import MANIFEST, find_damage

FILES = ("driver.pt", "policy/schedule.pt")
N_BYTES = 1000  # size of each file


def write_named(name: str, halfway: Callable[[], None] = lambda: None) -> Callable[[Path], None]:
    """Return a function that writes a checkpoint whose files contain `name`; it calls `halfway` within each file."""

    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        for file in FILES:
            with (folder / file).open("w") as opened:
                opened.write(name.ljust(N_BYTES // 2))
                opened.flush()
                halfway()
                opened.write(" " * (N_BYTES // 2))

    return write


def read(folder: Path) -> str:
    """Return the name in all files; fail if the checkpoint is incomplete."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert sorted(names) == sorted([*FILES, MANIFEST])
    assert find_damage(folder) == []
    texts = {(folder / file).read_text() for file in FILES}
    assert len(texts) == 1
    text = texts.pop()
    assert len(text) == N_BYTES
    return text.strip()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def assert_a_changed_byte_is_named(checkpoint: Path) -> None:
    """Change a byte of each file of a checkpoint in turn; assert that the file is named."""
    assert find_damage(checkpoint) == []
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        flip_a_bit(path)
        changed = f"the content of {path} has changed since it was saved"
        assert find_damage(checkpoint) == [f"{MANIFEST} is damaged" if path.name == MANIFEST else changed]
        flip_a_bit(path)
    assert find_damage(checkpoint) == []


def save(store: CheckpointStore, step: int, write: Callable[[Path], None], expected_bytes: int = 0) -> Path:
    """Save a checkpoint from synchronous code."""

    async def fill(folder: Path) -> None:
        write(folder)

    return asyncio.run(store.save(step, fill, expected_bytes))
