"""The extras of skyrl-train install what the commands of the documentation need."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "skyrl-train/pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


def packages_of(extra: str) -> set[str]:
    """Return the packages of an extra, including the packages of extras that it names."""
    names = set()
    for requirement in map(Requirement, EXTRAS[extra]):
        nested = [packages_of(inner) for inner in requirement.extras] if requirement.name == "skyrl-train" else []
        names |= {requirement.name}.union(*nested)
    return names - {"skyrl-train"}


def test_extras_for_several_processes_come_with_ray() -> None:
    assert packages_of("mcore") >= {"megatron-core", "ray"}
    for engine in ("vllm", "sglang", "flashrl"):
        assert packages_of(engine) >= {"ray", "wandb"}, engine


def test_extras_that_are_named_exist() -> None:
    texts = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("skyrl-train/skyrl_train/**/*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in texts)
    named = {name for names in re.findall(r"skyrl-train\[([\w,]+)\]", source) for name in names.split(",")}
    named |= set(re.findall(r"--extra (\w+)", source))
    assert named >= {"ray", "mcore", "vllm"}
    assert named <= EXTRAS.keys()
