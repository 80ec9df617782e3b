"""Names, links and paths in the documentation exist."""

import inspect
import re
from pathlib import Path

import pytest

from skyrl_gym.envs import BUILT_IN as BUILT_IN_ENVIRONMENTS
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.config.problems import FIELDS
from skyrl_train.config.supervised import DPO, REWARD, SFT

ROOT = Path(__file__).parents[3]
ALGORITHMS = ROOT / "docs/reference/algorithms.md"
GUIDES = ROOT / "docs/guides"
INCLUDED, OTHERS = GUIDES / "included-environments.md", GUIDES / "other-ecosystems.md"
OTHER_KEYS = ("agents", "coming-from-skyrl", "tinker")  # guides that name keys of task files or other projects
ALL_FIELDS = {*FIELDS, *SFT.fields, *SFT.aliases, *DPO.fields, *REWARD.fields}
BUILT_IN = {
    name: registry.get(name) for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES) for name in registry.list_available()
}
KEY = re.compile(r"\b(?:data|trainer|generator|environment)\.\w+(?:\.\w+)*(?![\w{])")


def test_the_pages_list_all_environments() -> None:
    included = INCLUDED.read_text(encoding="utf-8").partition("\n## ")[0]
    of_others = set(re.findall(r"environment\.env_class=(\w+)", OTHERS.read_text(encoding="utf-8")))
    assert set(BUILT_IN_ENVIRONMENTS) == set(keys_of_tables(included)) - {"env_class"} | of_others


def keys_of_tables(section: str) -> list[str]:
    """Return the first column of a section's tables."""
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_algorithm_has_a_row_with_its_source_and_tests(name: str) -> None:
    page = ALGORITHMS.read_text(encoding="utf-8")
    sections = [text for text in re.split(r"^###? ", page, flags=re.MULTILINE) if name in keys_of_tables(text)]
    function = inspect.unwrap(BUILT_IN[name])
    source = Path(inspect.getfile(function)).relative_to(ROOT)
    (section,) = [text for text in sections if f"Source `{source}`" in text] or [""]
    assert section, f"docs/reference/algorithms.md has no row for `{name}` under its source {source}"
    row = next(line for line in section.splitlines() if line.startswith(f"| `{name}` |"))
    assert row.split("|")[2].strip() == f"`{function.__name__}`"
    (tests,) = re.findall(r"tests\s`([^`]+)`", section)
    text = (ROOT / tests).read_text(encoding="utf-8")
    assert function.__name__ in text or f'"{name}"' in text, f"{tests} does not test it"


def test_names_and_paths_on_the_page_of_algorithms_exist() -> None:
    page = ALGORITHMS.read_text(encoding="utf-8")
    registry_sections = re.split(r"^## (?:Advantage estimators|Policy losses|Reductions)$", page, flags=re.MULTILINE)[
        1:3
    ]
    assert {name for section in registry_sections for name in keys_of_tables(section)} == set(BUILT_IN)
    missing = [path for path in re.findall(r"`(skyrl-\w+/[^`]+)`", page) if not (ROOT / path).exists()]
    assert not missing


def test_folders_and_files_of_tests_in_targets_and_workflows_exist() -> None:
    paths = {
        (source.name, path)
        for source in (ROOT / "Makefile", ROOT / ".ci/run", *(ROOT / ".github/workflows").iterdir())
        for path in re.findall(r"[\w-]+/tests/[\w/.]*", source.read_text(encoding="utf-8"))
    }
    assert len(paths) > 20
    missing = [f"{source}: {path}" for source, path in sorted(paths) if not (ROOT / path).exists()]
    assert not missing


def test_no_command_installs_our_packages_from_pypi() -> None:
    """PyPI has another project named skyrl-gym."""
    folders = ("docs", "skyrl-agent", "skyrl-gym", "skyrl-report", "skyrl-train", "skyrl-tx", "veritas-rl")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".sh")]
    paths = [path for path in files if "site-packages" not in path.parts]
    paths += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    from_pypi = re.compile(r"pip install[^\n`]*?(?<!-e)[\s']skyrl-\w+\[")
    assert len(paths) > 500
    assert [str(path) for path in paths if from_pypi.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "page",
    [
        ALGORITHMS,
        *(page for page in GUIDES.glob("*.md") if page.stem not in OTHER_KEYS),
        *(ROOT / "skyrl-train/examples/algorithms").rglob("*.md"),
    ],
)
def test_configuration_keys_on_the_pages_exist(page: Path) -> None:
    sections = {key.rpartition(".")[0] for key in ALL_FIELDS}
    words = [word for word in KEY.findall(page.read_text(encoding="utf-8")) if not word.endswith((".py", ".md"))]
    free = (
        "trainer.algorithm.custom.",
        "trainer.algorithm.gdpo.weights.",
        "generator.reward_weights.",
        "generator.chat_template_kwargs.",
        "environment.skyrl_gym.",
        "generator.engine_init_kwargs.",
        "data.mixture.weights.",
        "data.custom_cls.config.",
    )
    unknown = {word for word in words if word not in ALL_FIELDS and word not in sections and not word.startswith(free)}
    assert not unknown


def test_links_lead_to_files_of_the_repository() -> None:
    """The site rewrites links, so that its strict build accepts some that are broken for readers of the repository."""
    folders = ("adr", "guides", "internals", "reference", "start")
    pages = [*ROOT.glob("*.md"), *(page for name in folders for page in (ROOT / "docs" / name).glob("*.md"))]
    pages += [*ROOT.glob("docs/*.md"), *ROOT.glob("skyrl-*/README.md"), *ROOT.glob("skyrl-train/examples/**/*.md")]
    links = [(page, target) for page in pages for target in links_of(page)]
    assert len(links) > 300
    missing = [f"{page.relative_to(ROOT)}: {target}" for page, target in links if not (page.parent / target).exists()]
    assert not missing


def links_of(page: Path) -> list[str]:
    """Return the relative paths that a page links, without their anchors."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [path for path in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", text) if "://" not in path]
