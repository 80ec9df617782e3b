from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.browser.browser_dataset import main
from skyrl_gym.envs.browser.sites import make_site


def test_rows_name_a_site_and_a_seed(prepare: Any) -> None:
    splits = prepare(main)
    rows = [row for split in splits.values() for row in split]
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 960, "validation": 240}
    assert Counter(row.data_source for row in rows) == dict.fromkeys(
        ("browser_registration", "browser_books", "browser_shop"), 400
    )
    for row in rows:
        info = row.env_extras["extra_info"]
        assert row.env_class == "browser"
        assert row.prompt == [{"role": "user", "content": make_site(info["site"], info["seed"]).task}]
    tasks = {(row.data_source, row.env_extras["extra_info"]["seed"]) for row in rows}
    assert len(tasks) == len(rows)


def test_sites_and_the_number_of_tasks_can_be_chosen(prepare: Any) -> None:
    splits = prepare(main, "--sites", "shop, books", "--num_tasks", "10")
    infos = [row.env_extras["extra_info"] for rows in splits.values() for row in rows]
    assert sorted((info["seed"], info["site"]) for info in infos) == [
        (42 + i, ("shop", "books")[i % 2]) for i in range(10)
    ]


def test_an_unknown_site_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--output_dir", str(tmp_path), "--sites", "bank"])
    assert "site='bank' is unknown; use one of button, registration, books, shop" in capsys.readouterr().err
