from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pytest

from skyrl_gym.env_config import EnvConfig, env_config_of


def test_a_section_is_a_dict_with_attributes() -> None:
    config: Any = env_config_of({"topk": 3, "inner": {"a": 1}})
    assert (config.topk, config["topk"], config.get("topk"), "topk" in config) == (3, 3, 3, True)
    assert dict(config.items()) == {"topk": 3, "inner": {"a": 1}}
    assert config.inner.a == 1
    with pytest.raises(AttributeError, match=r"no 'topp'; set here: topk, inner\. Set environment\.skyrl_gym\."):
        _ = config.topp


def test_nothing_is_shared_with_what_it_was_made_from() -> None:
    section: dict[str, Any] = {"files": [], "seeds": np.arange(2), "day": date(2026, 1, 2)}
    config = env_config_of(section)
    assert config == {"files": [], "seeds": [0, 1], "day": "2026-01-02"}
    config.files.append("a")
    assert section["files"] == []


def test_of_nothing_it_says_so() -> None:
    with pytest.raises(AttributeError, match="set here: nothing"):
        _ = EnvConfig().topk
