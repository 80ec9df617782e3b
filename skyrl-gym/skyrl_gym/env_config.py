"""An environment's section of the configuration, where no OmegaConf reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyrl_gym.serialization import plain


class EnvConfig(dict[str, Any]):
    """A section of the configuration as environments read it: a dict, and `config.topk` is `config["topk"]`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        known = ", ".join(self) or "nothing"
        raise AttributeError(
            f"env_config has no {name!r}; set here: {known}. Set environment.skyrl_gym.<env_class>.{name}"
        )


def env_config_of(section: Mapping[str, Any]) -> EnvConfig:
    """A copy of a section, whose sections are `EnvConfig` too.

    Raises:
        TypeError: it has what no configuration file can hold.
    """
    config: EnvConfig = json.loads(json.dumps(dict(section), default=plain), object_hook=EnvConfig)
    return config
