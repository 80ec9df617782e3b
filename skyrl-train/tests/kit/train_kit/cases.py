"""Tables of test cases."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise_table(dimensions: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Return cases in which any two values of different dimensions occur together at least once, chosen greedily."""
    rng = random.Random(seed)
    sizes = {name: len(values) for name, values in dimensions.items()}
    missing = {
        ((left, i), (right, j))
        for left, right in combinations(dimensions, 2)
        for i in range(sizes[left])
        for j in range(sizes[right])
    }
    cases = []
    for pair in sorted(missing, key=str):
        if pair not in missing:
            continue
        required = dict(pair)
        candidates = [
            {name: required.get(name, rng.randrange(size)) for name, size in sizes.items()} for _ in range(30)
        ]
        best = max(candidates, key=lambda case: len(missing & set(combinations(case.items(), 2))))
        missing -= set(combinations(best.items(), 2))
        cases.append({name: dimensions[name][index] for name, index in best.items()})
    return cases


def pairs_by_default(dimensions: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return all combinations as parameters of a test, those beyond a pairwise table marked as nightly."""
    table = pairwise_table(dimensions)
    cases = [dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values())]
    return [
        pytest.param(case, id=format_case(case), marks=() if case in table else pytest.mark.nightly) for case in cases
    ]


def format_case(case: Mapping[str, Any]) -> str:
    """Return the id of a case."""
    return "-".join(map(str, case.values()))
