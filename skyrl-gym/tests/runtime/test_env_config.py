from datetime import date
from typing import Any

import numpy as np
import pytest

from skyrl_gym.runtime.env_config import EnvConfig, copy_env_config


def test_section_is_a_separate_dict_with_attributes() -> None:
    config: Any = copy_env_config({"topk": 3, "inner": {"a": 1}})
    assert (config.topk, config["topk"], config.get("topk"), "topk" in config) == (3, 3, 3, True)
    assert dict(config.items()) == {"topk": 3, "inner": {"a": 1}}
    assert config.inner.a == 1
    with pytest.raises(AttributeError, match=r"no key 'topp', only topk, inner\. Set environment\.skyrl_gym\."):
        _ = config.topp
    with pytest.raises(AttributeError, match="only nothing"):
        _ = EnvConfig().topk
    section: dict[str, Any] = {"files": [], "seeds": np.arange(2), "day": date(2026, 1, 2)}
    config = copy_env_config(section)
    assert config == {"files": [], "seeds": [0, 1], "day": "2026-01-02"}
    config.files.append("a")
    assert section["files"] == []
