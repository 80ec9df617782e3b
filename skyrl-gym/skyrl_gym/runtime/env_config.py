"""An environment's configuration section, for processes without OmegaConf."""

import json
from collections.abc import Mapping
from typing import Any

from skyrl_gym.runtime.serialization import to_json_value


class EnvConfig(dict[str, Any]):
    """A section of the configuration: a dict with attribute access, so `config.topk` is `config["topk"]`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        known = ", ".join(self) or "nothing"
        raise AttributeError(
            f"env_config has no key {name!r}, only {known}. Set environment.skyrl_gym.<env_class>.{name}"
        )


def copy_env_config(section: Mapping[str, Any]) -> EnvConfig:
    """Deep-copy a section. Nested sections also become `EnvConfig`.

    Raises:
        TypeError: the section holds a value that no configuration file can hold.
    """
    config: EnvConfig = json.loads(json.dumps(dict(section), default=to_json_value), object_hook=EnvConfig)
    return config
