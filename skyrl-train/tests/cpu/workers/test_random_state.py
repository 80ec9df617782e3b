import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_train.workers.random_state import random_state, set_random_state


@pytest.fixture(autouse=True)
def restore_random_state() -> Iterator[None]:
    state = random_state()
    yield
    set_random_state(state)


def draw() -> list[float]:
    """Draw from all generators. Python's and NumPy's cache the second of each pair of normal numbers."""
    return [random.gauss(0, 1), np.random.randn(), float(torch.randn(())), random.random(), np.random.rand()]


@pytest.mark.parametrize("n_drawn", [0, 1, 2, 700])
def test_the_sequence_continues_after_a_round_trip_through_a_file(tmp_path: Path, n_drawn: int) -> None:
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    for _ in range(n_drawn):
        draw()
    torch.save(random_state(), tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] != expected
    set_random_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_reading_the_state_does_not_change_it() -> None:
    random_state()
    expected = random_state()
    assert random_state()["python"] == expected["python"]
    assert random_state()["numpy"] == expected["numpy"]
    assert torch.equal(random_state()["torch"], expected["torch"])


@pytest.mark.parametrize(
    ("saved", "device", "restored"),
    [
        (torch.tensor([7]), "cuda", 7),
        (torch.tensor([7]), "cuda:3", 7),
        ([torch.tensor([7]), torch.tensor([8])], "cuda", 7),
        ([torch.tensor([7]), torch.tensor([8])], "cuda:1", 8),
        ([torch.tensor([7]), torch.tensor([8])], "cuda:3", 8),
        ([torch.tensor([7]), torch.tensor([8])], "cpu", None),
    ],
)
def test_only_the_generator_of_the_own_gpu_is_restored(
    saved: torch.Tensor | list[torch.Tensor], device: str, restored: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old checkpoints have a list, here from a process that saw two GPUs. tests/gpu restores a real generator."""
    calls: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: calls.append((state.item(), device)))
    set_random_state(random_state() | {"cuda": saved}, device)
    assert calls == ([] if restored is None else [(restored, device)])
