"""Specifications of ranks."""

from __future__ import annotations

from skyrl_train.types.specs import Layout


def test_a_layout_gives_each_rank_its_part() -> None:
    layout = Layout(8, tensor=2, pipeline=2)
    assert layout.n_parts == 2
    assert [layout.part(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.leader(part) for part in range(2)] == [4, 6], "the last stage has the scores"


def test_every_rank_of_a_sharded_model_is_a_part() -> None:
    layout = Layout(3)
    assert [layout.part(rank) for rank in range(3)] == [layout.leader(part) for part in range(3)] == [0, 1, 2]
