import json
from pathlib import Path

import pytest

from skyrl_train.models.generation import add_eos_ids


@pytest.mark.parametrize(
    ("own", "added", "expected"),
    [(2, [3], [2, 3]), ([2, 3], [3], [2, 3]), (None, [3], [3]), (2, [None], 2), (None, [None], None)],
)
def test_eos_tokens_are_added_once(
    own: int | list[int] | None, added: list[int | None], expected: int | list[int] | None, tmp_path: Path
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": own}))
    add_eos_ids(tmp_path, added)
    assert json.loads(file.read_text()) == {"eos_token_id": expected}
