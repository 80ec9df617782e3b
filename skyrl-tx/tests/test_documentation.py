import re
from pathlib import Path
from typing import Any

import pytest
from train_kit.vision_models import draw
from tx_kit.engines import serving_with_engine
from tx_kit.models import new_tokenizer, save_chat_model

from tx.tinker.backends.config import JaxConfig, TorchConfig
from tx.tinker.backends.factory import new_backend
from tx.tinker.config import TxConfig
from tx.tinker.losses import LOSSES
from tx.tinker.server.metrics import ServerMetrics

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "guides" / "tinker.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_backend_setting_is_documented_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for config in (JaxConfig, TorchConfig):
        for name, field in config.model_fields.items():
            (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
            if (default := field.get_default(call_default_factory=True)) is not None:
                written = str(default).lower().removesuffix(".0").replace(str(Path.home()), "~")
                assert row.split("|")[2].strip(" `") == written


def test_every_documented_flag_exists() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in TxConfig.model_fields}
    rows = [line for line in PAGE.splitlines() if line.startswith("| `--")]
    assert {flag for row in rows for flag in re.findall(r"`(--[\w-]+)`", row)} <= flags


def test_every_metric_is_documented() -> None:
    text = ServerMetrics().to_text({}, 0, 0, {}, is_engine_up=True).decode()
    names = set(re.findall(r"^# TYPE (\w+) (?:counter|gauge|histogram)$", text, re.MULTILINE))
    assert {name for name in names if not name.endswith(("_created", "_info"))} <= set(re.findall(r"`(tx_\w+)`", PAGE))


def test_every_loss_is_documented_with_its_defaults() -> None:
    for name, loss in LOSSES.items():
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        assert re.findall(r"`(\w+)`", row)[1:] == [*loss.needs[1:], *loss.settings]
        assert [float(one) for one in re.findall(r"` ([\d.]+)", row)] == list(loss.settings.values())


def test_the_compatibility_table_is_the_measured_one() -> None:
    page = (DOCS / "reference" / "tinker-clients.md").read_text("utf-8")
    assert (Path(__file__).parent / "sdk" / "compatibility.md").read_text("utf-8") in page


def test_the_example_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    save_chat_model("qwen3", model)
    code, _ = EXAMPLES
    backend = new_backend("torch", model, {}, str(model))
    with serving_with_engine(tmp_path / "state", backend, base_model=str(model)) as server:
        code = code.replace("http://127.0.0.1:8000", server.url).replace("Qwen/Qwen3-0.6B", str(model))
        written: dict[str, Any] = {}
        exec(compile(code, "docs/guides/tinker.md", "exec"), written)
        written["service"].close(status="success").result()
    *steps, sampled = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[1]) for line in steps]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert sampled == repr(new_tokenizer().decode(written["result"].sequences[0].tokens))


def test_the_example_with_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "board.png").write_bytes(draw("white"))
    monkeypatch.chdir(tmp_path)
    written: dict[str, Any] = {"tokenizer": new_tokenizer()}
    exec(compile(EXAMPLES[1], "docs/guides/tinker.md", "exec"), written)
    assert [chunk.length for chunk in written["prompt"].chunks][1] == 16
