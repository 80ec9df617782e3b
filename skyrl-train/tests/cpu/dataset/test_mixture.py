from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.dataset.mixture import MixedPrompts
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.types import PromptRow


class Sources:
    """A minimal dataset for mixing: n rows of each source, one source after the other."""

    def __init__(self, sizes: dict[str, int], fingerprint: str = "sources") -> None:
        self.fingerprint = fingerprint
        self._rows = [
            PromptRow(f"{name}{i}", [], None, {"data_source": name}) for name, n in sizes.items() for i in range(n)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self._rows)

    def data_sources(self) -> Iterator[str]:
        return (row.data_source for row in self._rows)


SIZES = {"games": 6, "maths": 30}


def mixed(weights: dict[str, float] | None = None, batch_size: int = 4, **options: Any) -> MixedPrompts:
    return MixedPrompts(Sources(options.pop("sizes", SIZES)), batch_size, 0, weights or {}, **options)  # type: ignore[arg-type]


def shares(prompts: MixedPrompts) -> Counter[str]:
    return Counter(prompt.row.data_source for prompt in prompts.next_batch())


def test_shares_follow_the_weights_or_else_the_sizes() -> None:
    for prompts, expected in (
        (mixed({"games": 3, "maths": 1}), {"games": 3, "maths": 1}),
        (mixed(batch_size=6), {"games": 1, "maths": 5}),
        (mixed({"games": 1, "maths": 99}, min_per_batch=1), {"games": 1, "maths": 3}),
        (mixed({"games": 0, "maths": 2}, min_per_batch=4), {"maths": 4}),
    ):
        assert [shares(prompts) for _ in range(10)] == [expected] * 10


def test_a_share_below_one_prompt_accumulates_over_batches() -> None:
    prompts = mixed({"games": 1, "maths": 15})
    drawn = [shares(prompts)["games"] for _ in range(16)]
    assert sum(drawn) == 4
    assert max(drawn) == 1


def test_prompts_forced_by_min_per_batch_are_not_owed_later() -> None:
    prompts = mixed({"games": 1, "maths": 999}, batch_size=8, min_per_batch=1)
    for _ in range(300):
        prompts.next_batch()
    prompts.set_weights({"games": 3, "maths": 1})
    assert sum(shares(prompts)["games"] for _ in range(4)) >= 22


def test_each_source_has_its_own_epochs() -> None:
    prompts = mixed({"games": 1, "maths": 1})
    games = [prompt.row.uid for _ in range(9) for prompt in prompts.next_batch() if prompt.row.data_source == "games"]
    epochs = [games[:6], games[6:12], games[12:]]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_epochs_of_the_whole_dataset_are_counted() -> None:
    prompts = mixed({"games": 1, "maths": 1})
    assert prompts.batches_per_epoch == 9
    for n in range(20):
        assert prompts.n_finished_epochs == n // 9
        prompts.next_batch()


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9), min_size=1).filter(
        lambda sizes: sum(sizes.values()) > 4
    ),
    st.data(),
)
def test_any_mixture_fills_its_batches_fairly_and_resumes(sizes: dict[str, int], data: st.DataObject) -> None:
    weights = {name: data.draw(st.integers(0, 5)) for name in sizes}
    if not any(weights.values()):
        weights[min(weights)] = 1
    batch_size = data.draw(st.integers(len(sizes), 5)) if len(sizes) <= 5 else 5
    min_per_batch = data.draw(st.integers(0, batch_size // len(sizes)))
    prompts = mixed(weights, batch_size, min_per_batch=min_per_batch, sizes=sizes)
    n_before, n_after = data.draw(st.integers(0, 7)), 6
    drawn = [[prompt.row.uid for prompt in prompts.next_batch()] for _ in range(n_before)]
    state = prompts.state_dict()
    drawn += [[prompt.row.uid for prompt in prompts.next_batch()] for _ in range(n_after)]
    resumed = mixed(weights, batch_size, min_per_batch=min_per_batch, sizes=sizes)
    resumed.load_state_dict(state)
    assert [[prompt.row.uid for prompt in resumed.next_batch()] for _ in range(n_after)] == drawn[n_before:]
    assert {len(batch) for batch in drawn} == {batch_size}
    counts = Counter(uid[0] for batch in drawn for uid in batch)
    for name, weight in weights.items():
        assert (counts[name] > 0) <= (weight > 0)
        if min_per_batch == 0:
            expected = len(drawn) * batch_size * weight / sum(weights.values())
            assert abs(counts[name] - expected) < len(sizes)
        elif weight:
            assert all(sum(uid[0] == name for uid in batch) >= min_per_batch for batch in drawn)


@pytest.mark.parametrize("resumes_weights", [True, False])
def test_changed_weights_are_resumed_only_with_resumes_weights(resumes_weights: bool) -> None:
    prompts = mixed({"games": 1, "maths": 1})
    prompts.set_weights({"games": 3, "maths": 1})
    resumed = mixed({"games": 1, "maths": 1}, resumes_weights=resumes_weights)
    resumed.load_state_dict(prompts.state_dict())
    assert resumed.weights["games"] == (0.75 if resumes_weights else 0.5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"games": 1}, r"data\.mixture\.weights has no weight for maths; set 0 to exclude a data source"),
        ({"games": 1, "maths": 1, "gmes": 1}, r"weights lists gmes, but the data sources are: games, maths"),
        ({"games": -1, "maths": 1}, r"weights\.games=-1 must be a number of at least 0"),
        ({"games": float("nan"), "maths": 1}, r"weights\.games=nan must be a number"),
        ({"games": 0, "maths": 0}, "weights are all 0; at least one of games, maths must have more"),
    ],
)
def test_wrong_weights_are_named(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixed(weights)


def test_a_min_per_batch_that_exceeds_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_per_batch=3 of each of 2 data sources .*train_batch_size=4"):
        mixed({"games": 1, "maths": 1}, min_per_batch=3)


def test_positions_of_another_sampler_are_refused() -> None:
    shuffled = ShuffledPrompts(Sources(SIZES), 4, 0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"made without data\.mixture"):
        mixed().load_state_dict(shuffled.state_dict())
    with pytest.raises(DataError, match=r"saved with data\.mixture, but this run has none"):
        shuffled.load_state_dict(mixed().state_dict())
