"""Stop reasons are strings, and the pages explain each of them."""

import json
import pickle
from pathlib import Path

from skyrl_train.types import StopReason

DOCS = Path(__file__).parents[4] / "docs"
PAGES = "\n".join(
    path.read_text(encoding="utf-8") for path in (DOCS / "reference/glossary.md", *DOCS.glob("guides/*.md"))
)


def test_a_reason_is_its_text_in_files_and_after_transfers() -> None:
    for reason in StopReason:
        assert json.loads(json.dumps({"stop_reason": reason})) == {"stop_reason": reason.value}
        assert pickle.loads(pickle.dumps(reason)) is reason
        assert f"{reason}" == reason.value
        assert reason.sentence.endswith(".")


def test_the_pages_explain_every_reason() -> None:
    for reason in StopReason:
        assert f"`{reason}`" in PAGES, reason
