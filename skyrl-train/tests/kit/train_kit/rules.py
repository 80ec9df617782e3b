"""Rules of the configuration, and the tests that every module of rules passes."""

import ast
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from skyrl_train.algorithms.rules import ALGORITHM_RULES, ALGORITHM_WARNINGS
from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.config.base import value_at
from skyrl_train.config.loading import RL, resolve
from skyrl_train.config.problems import FIELDS, raise_problems, show
from skyrl_train.config.rules import RULES, WARNINGS, find_problems
from skyrl_train.errors import ConfigError
from train_kit import golden

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
KL_IN_REWARD = f"{ALGORITHM}.use_kl_loss=false {ALGORITHM}.use_kl_in_reward=true"
GAE = f"{ALGORITHM}.advantage_estimator=gae trainer.critic.model.path=tiny"
SERVER = "generator.backend=vllm generator.run_engines_locally=false generator.remote_inference_engine_urls=[gpu:8000]"

THRESHOLDS = f"{CORRECTION}.token_mask_is_threshold_low=0.5 {CORRECTION}.token_mask_is_threshold_high=2.0"
CORRECTION_SWITCHES = {
    "tis_ratio_type": f"{CORRECTION}.tis_ratio_type=sequence",
    "sequence_mask_metric": f"{CORRECTION}.sequence_mask_metric=product",
    "token_mask_is_threshold_low": THRESHOLDS,
    "token_mask_is_threshold_high": THRESHOLDS,
    "outlier_token_is_threshold_low": f"{CORRECTION}.outlier_token_is_threshold_low=0.1",
    "outlier_token_is_threshold_high": f"{CORRECTION}.outlier_token_is_threshold_high=10.0",
}
"""Settings that turn a part of the off-policy correction on."""

PASSES = "passes: "
SETTING = re.compile(r"(?:[a-z_]+\.)+[a-z_]+=[^\s,;]+")


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """Return a nested mapping: `("a.b", 1)` → `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for key, value in pairs:
        *parents, name = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return tree


def load(overrides: str) -> SkyRLConfig:
    """Return a configuration that passes all rules, except for those of the machine."""
    cfg = load_config(OmegaConf.from_dotlist(overrides.split()))
    raise_problems(find_problems(cfg, ALGORITHM_RULES))
    return cfg


def resolve_only(overrides: str) -> SkyRLConfig:
    """Return a configuration that may break rules."""
    tree = OmegaConf.to_container(OmegaConf.from_dotlist(overrides.split()))
    return resolve(SkyRLConfig.model_validate(tree), RL)


def find_refusal(overrides: str) -> str:
    """Return the error of a configuration, or an empty text if it passes."""
    try:
        load(overrides)
    except ConfigError as error:
        return str(error)
    return ""


def find_warnings(overrides: str) -> list[str]:
    """Return the warnings of a configuration that passes."""
    return find_problems(load(overrides), WARNINGS + ALGORITHM_WARNINGS)


def describe(overrides: str) -> list[str]:
    """Return the error or the warnings of a configuration as a run prints them, or "accepted"."""
    if refusal := find_refusal(overrides):
        return [f"error: {refusal}"]
    return [f"warning: {sentence}" for sentence in find_warnings(overrides)] or ["accepted"]


def show_values(cfg: SkyRLConfig, settings: Iterable[str]) -> list[str]:
    """Return the given settings, e.g. `trainer.epochs=1`, with their values in a configuration."""
    keys = [setting.partition("=")[0] for setting in settings]
    return [f"{key}={show(value_at(cfg, key))}" for key in keys]


def find_lines(overrides: str) -> set[tuple[str, int]]:
    """Return the file and line of each `yield` that creates a sentence for a configuration."""
    cfg, lines = resolve_only(overrides), set()
    for rule in RULES + ALGORITHM_RULES + WARNINGS + ALGORITHM_WARNINGS:
        generator = rule(cfg)
        for _ in generator:
            innermost = generator
            while inspect.isgenerator(innermost.gi_yieldfrom):  # type: ignore[attr-defined]
                innermost = innermost.gi_yieldfrom  # type: ignore[attr-defined]
            lines.add((innermost.gi_code.co_filename, innermost.gi_frame.f_lineno))  # type: ignore[attr-defined]
    return lines


def find_suggestions(sentence: str) -> Iterator[str]:
    """Yield the overrides that a sentence suggests: "…; set a.b=1 and a.c=2, or a.d=3 or 4" has three suggestions."""
    _, _, fix = sentence.partition("; ")
    key = ""
    for choice in re.split(r",? or ", fix):
        settings = SETTING.findall(choice)
        if settings:
            key = settings[-1].partition("=")[0]
        elif key and re.fullmatch(r"[a-z0-9_+.]+", choice) and choice != "more":
            settings = [f"{key}={choice}"]
        if settings and not re.search("<|remove", choice):
            yield " ".join(settings)


def shows(sentence: str, key: str, value: object) -> bool:
    """Return whether a sentence names a key with its value: 1e-06 for 0.000001, or one entry of a list."""
    if isinstance(value, list) and any(show(entry) in sentence for entry in value):
        return True
    numbers = [f"{value:g}"] if isinstance(value, float) else []
    return any(f"{key}={text}" in sentence for text in [show(value), *numbers])


class RuleContract:
    """Tests of a module of rules, whose cases are in its golden file; `passes:` are overrides that solve a case."""

    module: ClassVar[ModuleType]
    tested_elsewhere: ClassVar[Sequence[str]] = ()
    """Functions of the module whose sentences depend on the machine or belong to another kind of run."""

    @property
    def golden_file(self) -> str:
        return self.module.__name__.removeprefix("skyrl_train.").replace(".", "/")

    @functools.cached_property
    def cases(self) -> dict[str, list[str]]:
        """Overrides that break a rule, each with the overrides to append so that they do not."""
        lines = golden.read(self.golden_file).items()
        return {case: [line.removeprefix(PASSES) for line in text if line.startswith(PASSES)] for case, text in lines}

    def test_sentences(self, pytestconfig: pytest.Config) -> None:
        printed = {case: describe(case) for case in self.cases}
        assert ["accepted"] not in printed.values()
        lines = {case: [*printed[case], *(PASSES + change for change in self.cases[case])] for case in self.cases}
        golden.compare(self.golden_file, lines, pytestconfig)

    def test_a_sentence_names_a_setting_and_its_value(self) -> None:
        for case in self.cases:
            cfg = resolve_only(case)
            for sentence in self._sentences(case):
                assert any(shows(sentence, key, value_at(cfg, key)) for key in FIELDS if key in sentence), sentence

    def test_similar_configurations_pass(self) -> None:
        for case, changes in self.cases.items():
            for change in changes:
                assert not any(self._sentences(f"{case} {change}", case)), f"{case} {change}"

    def test_suggestions_solve_the_problem(self) -> None:
        for case in self.cases:
            for sentence in self._sentences(case):
                for suggestion in find_suggestions(sentence):
                    assert sentence not in self._sentences(f"{case} {suggestion}", case), f"{case} {suggestion}"

    def test_every_sentence_has_a_case(self) -> None:
        lines = {
            (str(self.module.__file__), node.lineno)
            for function in ast.parse(inspect.getsource(self.module)).body
            if isinstance(function, ast.FunctionDef) and function.name not in self.tested_elsewhere
            for node in ast.walk(function)
            if isinstance(node, ast.Yield)
        }
        assert lines <= set().union(*map(find_lines, self.cases))

    def _sentences(self, overrides: str, case: str | None = None) -> list[str]:
        """Return the error or the warnings of overrides, depending on what their case has."""
        return [find_refusal(overrides)] if find_refusal(case or overrides) else find_warnings(overrides)
