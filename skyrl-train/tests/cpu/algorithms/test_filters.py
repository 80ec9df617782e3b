from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_kit.trajectories import make_segment, make_trajectory

from skyrl_train.algorithms.filters import GroupCollector, informative_groups, leave_out_truncated
from skyrl_train.config.algorithm import DynamicSamplingConfig
from skyrl_train.errors import DataError
from skyrl_train.types import Trajectory


def test_groups_of_unequal_rewards_and_groups_of_one_are_informative() -> None:
    rewards = [1.0, 0.0, 0.5, 1.0, 1.0, 7.0]
    assert informative_groups(rewards, ["a", "b", "a", "c", "c", "alone"], 1e-6) == {"a", "b", "alone"}


@pytest.mark.parametrize(("tolerance", "is_informative"), [(0.0, True), (0.24, True), (0.25, False), (0.3, False)])
def test_the_tolerance_is_a_standard_deviation(tolerance: float, is_informative: bool) -> None:
    assert informative_groups([0.5, 1.0], ["a", "a"], tolerance) == ({"a"} if is_informative else set())


def test_equal_rewards_are_uninformative_at_zero_tolerance() -> None:
    assert informative_groups([0.1] * 7, ["a"] * 7, 0.0) == informative_groups([], [], 0.0) == set()


def test_truncated_trajectories_are_masked_from_the_loss_and_keep_their_rewards() -> None:
    earlier = make_segment([0.0, 0.0, 0.75], loss_mask=[1, 0, 1])
    cut_off = make_trajectory("cut", [0.0, 0.5], loss_mask=[1, 1], earlier=[earlier], stop_reason="length")
    ended = make_trajectory("ended", [0.0, 1.0], earlier=[earlier])
    invalid = make_trajectory("invalid", None, stop_reason="length", error="no answer")
    empty = make_trajectory("empty", [], stop_reason="length")
    failed = make_trajectory("failed", [0.25], stop_reason="too long")
    masked, *others = leave_out_truncated([cut_off, ended, invalid, empty, failed])
    assert [row.loss_mask for row in masked.segments] == [[0, 0, 0], [0, 0]]
    assert [row.rewards for row in masked.segments] == [[0.0, 0.0, 0.75], [0.0, 0.5]]
    assert others == [ended, invalid, empty, failed]
    assert cut_off.loss_mask == [1, 1], "the input is unchanged"


def group(uid: str, *rewards: float) -> list[Trajectory]:
    return [make_trajectory(uid, [0.0, reward], repetition=i) for i, reward in enumerate(rewards)]


def good(uid: str) -> list[Trajectory]:
    return group(uid, 0.0, 1.0)


def bad(uid: str) -> list[Trajectory]:
    return group(uid, 1.0, 1.0)


def collector(n_prompts: int, seed: int = 0, **settings: Any) -> GroupCollector:
    return GroupCollector(DynamicSamplingConfig(**settings), 1e-6, n_prompts, Random(seed))


def add(collected: GroupCollector, trajectories: list[Trajectory], n_failed: int = 0) -> None:
    """Add a batch; `n_failed` further prompts were drawn for it, and all their rollouts failed."""
    draws = list(dict.fromkeys(t.id.draw for t in trajectories))
    collected.add(trajectories, [*draws, *range(1000, 1000 + n_failed)])


def collect(n_prompts: int, *batches: str, seed: int = 0, **settings: Any) -> GroupCollector:
    """Add batches of groups, numbered from 0, that are good (+) or bad (-); only the last may complete the step."""
    collected, uids = collector(n_prompts, seed, **settings), count()
    for batch in batches:
        assert not collected.is_complete
        add(collected, [t for sign in batch for t in (good if sign == "+" else bad)(str(next(uids)))])
    return collected


def groups(trajectories: list[Trajectory]) -> list[tuple[int, str]]:
    """Return (draw, dataset row) of each group, in order; assert that each group is contiguous."""
    names = [(t.id.draw, t.id.instance_id) for t in trajectories]
    starts = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    assert len({draw for draw, _ in starts}) == len(starts), f"the rows of a group are not contiguous: {names}"
    return starts


def uids(trajectories: list[Trajectory]) -> list[str]:
    """Return the dataset row of each group, in order."""
    return [uid for _, uid in groups(trajectories)]


def metrics(collected: GroupCollector) -> tuple[float, float, float, float]:
    values = collected.metrics()
    assert list(values) == [
        "generate/n_sample_batches",
        "generate/n_groups_dropped",
        "generate/n_groups_replaced",
        "generate/signal_ratio",
    ]
    return tuple(values.values())  # type: ignore[return-value]


def test_without_dynamic_sampling_one_batch_completes_the_step() -> None:
    collected = collect(2, "+-+")
    assert collected.is_complete
    assert collected.take() == [*good("0"), *bad("1"), *good("2")]
    assert metrics(collected) == (1, 0, 0, 2 / 3)


def test_filter_collects_batches_until_it_has_enough_good_groups() -> None:
    collected = collect(3, "-+-", "+--", "++-", type="filter")
    assert collected.is_complete
    assert uids(collected.take()) == ["1", "3", "6"], "in arrival order, the surplus is dropped"
    assert len(collected.take()) == 6
    assert metrics(collected) == (3, 6, 0, 4 / 9)


def test_groups_are_compared_by_total_reward_and_a_group_of_one_is_good() -> None:
    collected = collector(n_prompts=1, type="filter")
    add(collected, [make_trajectory("0", [1.0, 0.0]), make_trajectory("0", [0.0, 1.0])])  # the sum is the same
    assert not collected.is_complete
    add(collected, group("1", 1.0))
    assert uids(collected.take()) == ["1"]


def test_replace_fills_bad_slots_with_distinct_good_groups_if_there_are_enough() -> None:
    seen = set()
    for seed in range(20):
        collected = collect(5, "+-+-+", seed=seed, type="replace")
        taken = collected.take()
        first, second, third, fourth, fifth = uids(taken)
        assert (first, third, fifth) == ("0", "2", "4")
        seen.add((second, fourth))
        assert len(taken) == 10
        assert [draw for draw, _ in groups(taken)] == [0, 1, 2, 3, 4], "a copy takes the draw of the group it replaces"
        assert metrics(collected) == (1, 2, 2, 3 / 5)
    assert seen == {(a, b) for a in "024" for b in "024" if a != b}


def test_a_copy_equals_its_source_except_for_the_draw() -> None:
    collected = collector(n_prompts=2, type="replace")
    add(collected, [*bad("17"), *good("18")])
    copy, original = collected.take()[:2], collected.take()[2:]
    assert [(t.id.instance_id, t.id.repetition_id, t.id.draw) for t in copy] == [("18", 0, 17), ("18", 1, 17)]
    assert original == good("18")
    assert [t.rewards for t in copy] == [t.rewards for t in original]


def test_replace_repeats_groups_when_there_are_too_few() -> None:
    collected = collect(5, "--++-", type="replace")
    names = uids(collected.take())
    assert len(names) == 5, "every copy is a separate group"
    assert names[2:4] == ["2", "3"]
    assert set(names) == {"2", "3"}
    assert metrics(collected) == (1, 3, 3, 2 / 5)


@pytest.mark.parametrize(("ratio", "is_enough"), [(0.2, True), (0.25, False), (0.3, False)])
def test_replace_samples_again_unless_the_good_share_exceeds_min_replace_ratio(ratio: float, is_enough: bool) -> None:
    assert collect(4, "+---", type="replace", min_replace_ratio=ratio).is_complete == is_enough
    if not is_enough:
        collected = collect(4, "+---", "++-+", type="replace", min_replace_ratio=ratio)
        assert uids(collected.take())[:2] == ["4", "5"], "the first batch is discarded"
        assert metrics(collected) == (2, 5, 1, 4 / 8)


def test_replace_fills_the_slots_of_failed_prompts() -> None:
    collected = collector(n_prompts=4, type="replace")
    add(collected, [*good("0"), *bad("1"), *good("2")], n_failed=1)
    names = uids(collected.take())
    assert (names[0], names[2]) == ("0", "2")
    assert sorted([names[1], names[3]]) == ["0", "2"]
    assert metrics(collected) == (1, 1, 2, 2 / 3)


def test_replace_copies_nothing_if_there_are_enough_good_groups() -> None:
    for batch, ratio, names, n_dropped in (("++", 1.0, ["0", "1"], 0), ("-+-++", 0.0, ["1", "3"], 3)):
        collected = collect(2, batch, type="replace", min_replace_ratio=ratio)
        assert uids(collected.take()) == names
        assert metrics(collected) == (1, n_dropped, 0, batch.count("+") / len(batch))


def test_the_same_seed_chooses_the_same_copies() -> None:
    chosen = [uids(collect(8, "-+" * 4, seed=seed, type="replace").take()) for seed in (3, 3, *range(10))]
    assert chosen[0] == chosen[1]
    assert len({tuple(names) for names in chosen}) > 1


@pytest.mark.parametrize(
    ("kind", "needed"), [("filter", "type=filter needs 4"), ("replace", "type=replace needs more than 2 in one batch")]
)
def test_it_raises_after_max_sample_batches(kind: str, needed: str) -> None:
    collected = collector(n_prompts=4, type=kind, max_sample_batches=2, min_replace_ratio=0.5)
    add(collected, [*good("0"), *bad("1")])
    with pytest.raises(DataError) as error:
        add(collected, [*good("2"), *bad("3"), *bad("4")])
    for words in ("drew 2 batches", "2 of their 5 groups", needed, "temperature", "max_sample_batches=2", "too hard"):
        assert words in str(error.value)


def test_the_last_batch_may_complete_the_step_and_minus_one_never_gives_up() -> None:
    assert collect(2, "+", "+", type="filter", max_sample_batches=2).is_complete
    assert not collect(1, *"-" * 100, type="filter", max_sample_batches=-1).is_complete


def test_a_draw_is_added_once_until_the_step_is_complete() -> None:
    collected = collector(n_prompts=2, type="filter")
    add(collected, good("0"))
    with pytest.raises(AssertionError, match=r"drawn twice: \[0\]"):
        add(collected, good("0"))
    with pytest.raises(AssertionError, match="more batches"):
        collected.take()
    add(collected, good("1"))
    with pytest.raises(AssertionError, match="complete"):
        add(collected, good("2"))


@given(
    batches=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6),
    kind=st.sampled_from(["filter", "replace"]),
    seed=st.integers(0, 3),
)
def test_the_counts_add_up(batches: list[list[bool]], kind: str, seed: int) -> None:
    collected = collector(n_prompts=3, seed=seed, type=kind)
    n_sampled = 0
    for batch in batches:
        if collected.is_complete:
            break
        add(collected, [t for i, is_good in enumerate(batch) for t in (good if is_good else bad)(f"{n_sampled + i}")])
        n_sampled += 3
    if collected.is_complete:
        taken = uids(collected.take())
        _, n_dropped, n_replaced, _ = metrics(collected)
        assert len(taken) == 3
        assert len(taken) == n_sampled - n_dropped + n_replaced
        assert n_replaced == sum(draw != int(uid) for draw, uid in groups(collected.take()))
        assert all(len({t.total_reward for t in collected.take() if t.id.instance_id == uid}) == 2 for uid in taken)
