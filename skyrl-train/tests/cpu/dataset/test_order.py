import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_kit.rollouts import Numbers

from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.errors import DataError, SkippedRow
from skyrl_train.types import PromptRow


def shuffled(n_rows: int, batch_size: int, seed: int = 0) -> ShuffledPrompts:
    return ShuffledPrompts(Numbers(n_rows), batch_size, seed)  # type: ignore[arg-type]


def uids(prompts: ShuffledPrompts, n_batches: int) -> list[list[str]]:
    return [[prompt.row.uid for prompt in prompts.next_batch()] for _ in range(n_batches)]


@given(n_rows=st.integers(1, 12), batch_size=st.integers(1, 12), seed=st.integers(0, 2**63 - 1))
def test_an_epoch_is_a_permutation_without_the_incomplete_batch(n_rows: int, batch_size: int, seed: int) -> None:
    batch_size = min(batch_size, n_rows)
    prompts = shuffled(n_rows, batch_size, seed)
    assert prompts.batches_per_epoch == n_rows // batch_size
    for _ in range(3):
        batches = uids(prompts, prompts.batches_per_epoch)
        assert {len(batch) for batch in batches} == {batch_size}
        drawn = [uid for batch in batches for uid in batch]
        assert len(set(drawn)) == len(drawn) == n_rows - n_rows % batch_size


def test_orders_differ_between_epochs_and_seeds_and_repeat_with_the_seed() -> None:
    first, again, other = shuffled(50, 50, seed=3), shuffled(50, 50, seed=3), shuffled(50, 50, seed=4)
    epochs = uids(first, 4)
    assert epochs == uids(again, 4)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert uids(other, 1)[0] != epochs[0]


def test_shuffling_does_not_change_the_global_random_state() -> None:
    before = torch.get_rng_state()
    shuffled(5, 2).next_batch()
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=50)
@given(n_rows=st.integers(1, 9), batch_size=st.integers(1, 9), n_before=st.integers(0, 12), seed=st.integers(0, 9))
def test_a_restored_position_continues_with_the_next_batch(
    n_rows: int, batch_size: int, n_before: int, seed: int
) -> None:
    batch_size = min(batch_size, n_rows)
    original, resumed = shuffled(n_rows, batch_size, seed), shuffled(n_rows, batch_size, seed)
    uids(original, n_before)
    resumed.load_state_dict(original.state_dict())
    assert resumed.state_dict() == original.state_dict()
    assert uids(resumed, 5) == uids(original, 5)


@pytest.mark.parametrize(("old_size", "new_size"), [(2, 5), (5, 2), (1, 10)])
def test_with_another_batch_size_the_epoch_continues_with_the_remaining_rows(old_size: int, new_size: int) -> None:
    old, resumed = shuffled(10, old_size), shuffled(10, new_size)
    order = uids(shuffled(10, 10), 1)[0]
    uids(old, 1)
    resumed.load_state_dict(old.state_dict())
    (batch,) = uids(resumed, 1)
    assert batch == (order[old_size : old_size + new_size] if new_size < 10 else uids(shuffled(10, 10), 2)[1])
    assert all(len(batch) == new_size for batch in uids(resumed, 20))


@pytest.mark.parametrize(
    ("n_rows", "seed", "fingerprint", "difference"),
    [
        (11, 0, "numbers", "n_rows=10, .* n_rows=11"),
        (10, 1, "numbers", "seed=0, .*=1"),
        (10, 0, "letters", "fingerprint=numbers, .* fingerprint=letters"),
    ],
)
def test_a_position_in_other_data_is_refused(n_rows: int, seed: int, fingerprint: str, difference: str) -> None:
    other = Numbers(n_rows)
    other.fingerprint = fingerprint
    with pytest.raises(DataError, match=f"{difference}; .*trainer.resume_mode=none"):
        ShuffledPrompts(other, 2, seed).load_state_dict(shuffled(10, 2).state_dict())  # type: ignore[arg-type]


def test_a_dataset_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"has 3 usable rows, fewer than trainer\.train_batch_size=4"):
        shuffled(3, 4)


def test_draws_are_numbered_consecutively() -> None:
    prompts = shuffled(5, 2)
    draws = [prompt.draw for _ in range(6) for prompt in prompts.next_batch()]
    assert draws == list(range(12)), "the same row in another epoch is another draw"
    resumed = shuffled(5, 2)
    resumed.load_state_dict(prompts.state_dict())
    assert [prompt.draw for prompt in resumed.next_batch()] == [12, 13]


def test_unused_prompts_are_drawn_first_and_keep_the_end_of_their_epoch() -> None:
    prompts = shuffled(6, 3)
    batches = [prompts.next_batch() for _ in range(3)]
    state = prompts.state_dict(unused=[*batches[1], *batches[2]])
    resumed = shuffled(6, 3)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [resumed.next_batch() for _ in range(3)] == [*batches[1:], prompts.next_batch()]
    assert [prompt.ends_epoch for batch in batches for prompt in batch] == [False] * 5 + [True] + [False] * 3

    class Shorter(Numbers):
        def __getitem__(self, index: int) -> PromptRow:
            if index == batches[1][-1].index:
                raise SkippedRow("too long now")
            return super().__getitem__(index)

    resumed = ShuffledPrompts(Shorter(6), 3, seed=0)  # type: ignore[arg-type]
    resumed.load_state_dict(state)
    drawn = [*resumed.next_batch(), *resumed.next_batch()]
    assert [prompt.draw for prompt in drawn] == [3, 4, 6, 7, 8, 9]
    assert [prompt.draw for prompt in drawn if prompt.ends_epoch] == [4], "the last prompt that is left of the epoch"
