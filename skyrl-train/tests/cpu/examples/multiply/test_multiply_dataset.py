import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.multiply.multiply_dataset import main


def factors(row: Any) -> tuple[int, int]:
    match = re.fullmatch(r"What is (\d+) \* (\d+)\?", row.prompt[-1]["content"])
    return int(match[1]), int(match[2])


def test_every_row_can_be_played(prepare: Any, play: Any) -> None:
    splits = prepare(main)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 1600, "validation": 400}
    for split, rows in splits.items():
        assert rows[0].env_extras["extra_info"] == {"split": split, "num_digits": 2}
    for row in [*splits["train"], *splits["validation"]][::10]:
        a, b = factors(row)
        assert "\\boxed{}" in row.prompt[0]["content"]
        assert row.data_source == "synthetic_multiply"
        assert play(row, f"\\boxed{{{a * b}}}", max_turns=1) == 1.0
        assert play(row, f"\\boxed{{{a * b + 10}}}", max_turns=1) == 0.0
        assert play(row, f"{a * b}", max_turns=1) == 0.0
        assert play(row, "Hm.", f"\\boxed{{{a * b}}}", max_turns=3) == 1.0


@pytest.mark.parametrize("num_digits", [1, 2, 3, 30])
def test_factors_have_num_digits_digits_and_pairs_are_unique(prepare: Any, num_digits: int) -> None:
    splits = prepare(main, "--num_digits", str(num_digits))
    pairs = [tuple(sorted(factors(row))) for rows in splits.values() for row in rows]
    assert len(set(pairs)) == len(pairs) == (45 if num_digits == 1 else 2000)
    assert {len(str(factor)) for pair in pairs for factor in pair} == {num_digits}
    assert {row.env_extras["extra_info"]["num_digits"] for rows in splits.values() for row in rows} == {num_digits}


def test_custom_factors_are_read_from_a_file(prepare: Any, tmp_path: Path) -> None:
    file = tmp_path / "factors.jsonl"
    file.write_text("\n".join(json.dumps({"a": n, "b": n + 1}) for n in range(10, 15)))
    splits = prepare(main, "--source", str(file))
    match = sorted(row.env_extras["reward_spec"]["ground_truth"] for rows in splits.values() for row in rows)
    assert match == ["110", "132", "156", "182", "210"]


@pytest.mark.parametrize("num_digits", ["0", "-1", "1001"])
def test_invalid_numbers_of_digits_are_refused(num_digits: str, refuse: Any) -> None:
    assert f"--num_digits={num_digits} must be from 1 to 1000" in refuse(main, "--num_digits", num_digits)
