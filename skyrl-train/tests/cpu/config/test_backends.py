"""A new engine is a module and a row of the table."""

from pathlib import Path

import pytest
from train_kit.runs import expect_error, train

from skyrl_train.config.backends import ENGINES, EngineTraits

NEW_ENGINE = """
from skyrl_train.inference_engines.hf.engine import start as start_embedded


def start(setup):
    print("the new engine has", setup.cfg.generator.max_num_seqs, "sequences", flush=True)
    return start_embedded(setup)
"""


def test_a_new_engine_is_a_module_and_a_row(
    catch_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new_engine.py").write_text(NEW_ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    assert "generator.backend=new must be one of auto, hf, vllm" in expect_error(*catch_run, "generator.backend=new")
    monkeypatch.setitem(ENGINES, "new", EngineTraits("the new engine", "new_engine:start"))
    train(*catch_run, "generator.backend=new", "generator.max_num_seqs=7", "trainer.max_training_steps=1")
    assert "the new engine has 7 sequences" in capsys.readouterr().out
    monkeypatch.setitem(ENGINES, "new", EngineTraits("the new engine", "new_engine:start", package="no_package"))
    assert "needs the new engine, which is not installed" in expect_error(*catch_run, "generator.backend=new")
