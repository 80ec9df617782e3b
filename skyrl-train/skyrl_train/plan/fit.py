"""The cheapest changes of the settings with which a run fits into memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.base import value_at, with_value
from skyrl_train.config.problems import show
from skyrl_train.config.rules import RULES, RUN_RULES, find_problems
from skyrl_train.config.supervised import SupervisedConfig
from skyrl_train.plan.memory import MemoryForecast

Config = SkyRLConfig | SupervisedConfig
Forecast = Callable[[Config], MemoryForecast | None]


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that save memory, and their price."""

    settings: tuple[tuple[str, Any], ...]
    price: str

    def __str__(self) -> str:
        return " ".join(f"{key}={show(value)}" for key, value in self.settings)


UTILIZATION = "generator.gpu_memory_utilization"
MAX_TOKENS = "trainer.max_tokens_per_microbatch"

CHANGES = (
    Change(((UTILIZATION, 0.4),), "fewer sequences at once in the engine"),
    Change(((MAX_TOKENS, 4096),), "smaller passes"),
    Change((("trainer.gradient_checkpointing", True),), "a third more compute in the update"),
    Change(((MAX_TOKENS, 1024),), "small passes, which use a GPU badly"),
    Change((("trainer.policy.model.dtype", "bfloat16"),), "a reference and exports in bfloat16"),
    Change((("trainer.policy.optimizer_config.name", "adamw_8bit"),), "moments in 8 bits"),
    Change((("trainer.policy.model.train_dtype", "bfloat16"),), "weights in bfloat16, rounded stochastically"),
    Change(
        (("trainer.critic.optimizer_config.name", "adamw_8bit"), ("trainer.critic.model.train_dtype", "bfloat16")),
        "a critic in bfloat16, with moments in 8 bits",
    ),
    Change((("trainer.policy.optimizer_config.cpu_offload", True),), "optimizer steps on the CPU"),
    Change(
        (("trainer.policy.model.lora.rank", 32), ("trainer.policy.model.train_dtype", "float32")),
        "an adapter instead of all weights; raise the learning rate about tenfold",
    ),
    Change((("trainer.policy.model.lora.quantize_base", "nf4"),), "a base in 4 bits"),
)
"""Changes from the cheapest to the dearest. Results change from the fifth on."""


def find_fit(
    cfg: Config, forecast: Forecast, changes: Sequence[Change] = CHANGES
) -> tuple[Config, list[Change]] | None:
    """Return the settings with which the run fits, and the changes. Return None if all changes are not enough.

    Changes are added from the cheapest on until the run fits. Then each is left out again if the run fits without it,
    the dearest first: once an adapter is needed, the optimizer's 8 bits are not.
    """
    taken: list[Change] = []
    first = forecast(cfg)
    budget = 0 if first is None else first.rows.budget
    for change in changes:
        if _fits(cfg, taken, forecast):
            break
        if any(key == MAX_TOKENS and value >= budget for key, value in change.settings):
            continue  # the default is already lower
        if _apply(cfg, [*taken, change]) is not None:
            taken.append(change)
    if not _fits(cfg, taken, forecast):
        return None
    for change in reversed(taken.copy()):
        rest = [other for other in taken if other is not change]
        if _fits(cfg, rest, forecast):
            taken = rest
    fitting = _apply(cfg, taken)
    assert fitting is not None
    return fitting, taken


def _fits(cfg: Config, changes: Sequence[Change], forecast: Forecast) -> bool:
    changed = _apply(cfg, changes)
    memory = None if changed is None else forecast(changed)
    return memory is not None and memory.find_shortage() is None


def _apply(cfg: Config, changes: Sequence[Change]) -> Config | None:
    """Return the changed configuration, or None if it lacks a key, already has the settings, or breaks a rule."""
    for change in changes:
        try:
            current = {key: value_at(cfg, key) for key, _ in change.settings}
        except KeyError:  # a run on fixed data has no engine
            return None
        wanted = dict(change.settings)
        if current == wanted or current.get(UTILIZATION, 1.0) < wanted.get(UTILIZATION, 0.0):
            return None
        for key, value in change.settings:
            cfg = with_value(cfg, key, value)
    return cfg if not find_problems(cfg, RULES if isinstance(cfg, SkyRLConfig) else RUN_RULES) else None
