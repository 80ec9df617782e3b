import json
from pathlib import Path

import pytest
import yaml
from train_kit.runs import expect_error, train

from skyrl_train.entrypoints import cli, memory_plan
from skyrl_train.plan.hardware import GIB, Hardware


def show_plan(*arguments: str) -> None:
    assert cli.main(["plan", *arguments]) == 0


def plan_as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capsys.readouterr()
    show_plan("--json", *arguments)
    content: dict[str, object] = json.loads(capsys.readouterr().out)
    return content


def test_a_plan_is_printed_drawn_and_machine_readable(
    catch_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.png"
    show_plan(*catch_run, "--gpu", "H100", "--price", "2", "--picture", str(picture))
    text = capsys.readouterr().out
    assert "memory of each GPU (H100), 85.9 GB free" in text
    assert "policy: optimizer state" in text
    assert "per step at 2 per GPU hour; expect an error of up to a factor of 2" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = plan_as_json(capsys, *catch_run)
    assert content["fits"] is True
    assert set(content["totals"]["host"]) == {"load", "rollout", "score", "update", "sync", "save"}  # type: ignore[index]


def test_files_and_engines_need_not_exist_on_the_machine_that_plans(
    catch_run: list[str], tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["data.train_data=[/nowhere/train.parquet]", "generator.backend=sglang"]
    show_plan(f"trainer.policy.model.path={tiny_model_path}", *settings, "--gpu-memory", "8")
    assert "memory of each GPU (a GPU with 8 GiB), 8.59 GB free" in capsys.readouterr().out
    message = expect_error("trainer.policy.model.path=owner/unknown", command="plan")
    assert "the size of owner/unknown is unknown; download its description first: hf download owner/unknown" in message
    assert "--command tune is not a kind of run" in expect_error("--command", "tune", command="plan")


def test_a_run_that_does_not_fit_gets_settings_with_which_it_does(
    catch_run: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = plan_as_json(capsys, *catch_run)
    peak = content["peaks"]["host"]["bytes"]  # type: ignore[index]
    limit = ("--host-memory", str((peak - 1e5) / GIB))
    message = expect_error(*catch_run, *limit, command="plan")
    assert message.startswith("error: the update takes ")
    assert ": set trainer." in message
    fitting = plan_as_json(capsys, *catch_run, *limit, "--fit")
    assert fitting["fits"] is True
    (change,) = fitting["changes"]  # type: ignore[misc]
    assert str(change) in message
    monkeypatch.setattr(memory_plan, "this_machine", lambda n_ranks: Hardware("CPU", None, peak - 1e5))
    run = train(*catch_run, "--fit", "trainer.max_training_steps=1")
    key, _, value = str(change).rpartition("=")
    settings = yaml.safe_load((run.folder / "config.yaml").read_text())
    for name in key.split("."):
        settings = settings[name]
    assert str(settings).lower() == value


def test_supervised_runs_have_a_plan(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"trainer.policy.model.path={tiny_model_path}", "data.train_data=[chats.jsonl]", "--command", "sft")
    show_plan(*arguments)
    text = capsys.readouterr().out
    assert "update" in text
    assert "rollout" not in text
    assert "use a smaller model" in expect_error(*arguments, "--host-memory", "0.1", command="plan")


def test_auto_chooses_the_preset_of_the_gpus(
    catch_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    for sizes, preset in (("24564", "single_gpu_24gb"), ("81559", "single_gpu_80gb"), ("81559\\n" * 8, "eight_gpu")):
        program.write_text(f"#!/bin/sh\nprintf '{sizes}'\n")
        program.chmod(0o755)
        caplog.clear()
        with caplog.at_level("INFO"):
            show_plan(*catch_run, "+preset=auto", "generator.backend=auto", "--gpu", "H100")
        assert f"preset={preset}" in caplog.text
