import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_kit.models import CPU, SMALL, create_model, load_on_cpu
from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
)

from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import check_vocabulary_size, load_model, load_tokenizer


@pytest.fixture
def tokenizer_folder(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """A copy of the tiny tokenizer that tests modify."""
    tiny_tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def model_folder(tiny_model_path: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that tests modify."""
    return Path(shutil.copytree(tiny_model_path, tmp_path, dirs_exist_ok=True))


def test_the_tokenizer_pads_on_the_left_with_its_eos_token_if_it_has_no_other(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    padded = tokenizer(["L", "LRS"], padding=True)
    assert [padded["attention_mask"][0][i] for i in (0, -1)] == [0, 1]
    assert tokenizer.pad_token != tokenizer.eos_token
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tokenizer_folder)
    assert load_tokenizer(str(tokenizer_folder)).pad_token == tokenizer.eos_token


@pytest.mark.parametrize(
    ("missing", "message"), [("eos_token", "has no eos_token"), ("chat_template", "has no chat template")]
)
def test_a_tokenizer_without_eos_token_or_chat_template_is_refused(
    tokenizer_folder: Path, missing: str, message: str
) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    setattr(tokenizer, missing, None)
    (tokenizer_folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tokenizer_folder)
    with pytest.raises(ConfigError, match=message) as caught:
        load_tokenizer(str(tokenizer_folder))
    assert str(tokenizer_folder) in str(caught.value)


@pytest.mark.parametrize(
    ("folder", "end"),
    [
        *((folder, "Hub knows.") for folder in ("/no/such/folder", "~/no/such/folder", ".")),
        ("models/qwen-05b", "Hub knows. Did you mean 'models/qwen-0.5b'?"),
    ],
)
@pytest.mark.parametrize(("kind", "load"), [("tokenizer", load_tokenizer), ("model", load_model)])
def test_a_missing_or_empty_folder_is_named_with_its_key(
    folder: str, end: str, kind: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "models/qwen-0.5b").mkdir(parents=True)
    options = {} if load is load_tokenizer else {"dtype": torch.float32, "device": CPU}
    with pytest.raises(ConfigError, match=rf"cannot load the {kind} from trainer\.policy\.model\.path=") as caught:
        load(folder, **options)
    assert f"={folder}: " in str(caught.value)
    assert "config.json" in str(caught.value)
    assert str(caught.value).endswith(end)


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(0)
        url = "http://{}:{}".format(*hub.getsockname())
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("skyrl_train.models.loading.HUB_TIMEOUT_S", 0.2)
        with pytest.raises(ConfigError, match=f"{url} cannot be reached: .*a name the Hugging Face Hub knows"):
            load_tokenizer("owner/never-downloaded")
        hub.accept()[0].close()
        with pytest.raises(BlockingIOError):
            hub.accept()


def test_a_model_is_loaded_in_the_given_dtype_and_in_eval_mode(tiny_model_path: Path) -> None:
    model = load_on_cpu(tiny_model_path, dtype=torch.bfloat16, gradient_checkpointing=True)
    assert isinstance(model, Qwen3ForCausalLM)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(module.training for module in model.modules())
    assert model.is_gradient_checkpointing


def test_a_model_that_post_processes_its_logits_is_refused(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Qwen3ForCausalLM.forward

    def doubled_forward(self: Qwen3ForCausalLM, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", doubled_forward)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM changes its logits .* use another architecture"):
        load_on_cpu(tiny_model_path)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 8.0}
LONGROPE |= {"original_max_position_embeddings": 32, "rope_theta": 10_000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Phi3Config(**SMALL, pad_token_id=0, original_max_position_embeddings=32, rope_parameters=LONGROPE),
            "rope_type longrope",
        ),
        (LlamaConfig(**SMALL, rope_parameters=DYNAMIC), "rope_type dynamic"),
        (
            Gemma3TextConfig(**SMALL, rope_parameters={"full_attention": DYNAMIC, "sliding_attention": LOCAL}),
            "rope_type dynamic",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:24],
)
def test_a_model_whose_log_probs_would_be_wrong_is_refused(config: Any, reason: str, tmp_path: Path) -> None:
    create_model(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_on_cpu(tmp_path)


def test_a_tokenizer_has_no_more_tokens_than_the_model_has_embeddings(model_folder: Path) -> None:
    for token in ("<image>", "<new>"):
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        tokenizer.add_tokens([token])
        tokenizer.save_pretrained(model_folder)
        if token == "<image>":  # a placeholder that text models lack, as in Gemma 3
            load_tokenizer(str(model_folder))
    with pytest.raises(ConfigError, match=r"has 488 embeddings, but 1 tokens .* larger ids, e.g. '<new>'"):
        load_tokenizer(str(model_folder))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "{folder} lacks 1 weights of a Qwen3ForCausalLM, e.g. {name};"),
        (float("nan"), "{folder} has NaN or infinite weights in {name}; use another checkpoint"),
    ],
)
def test_weights_that_are_missing_or_nan_are_named(value: float | None, message: str, model_folder: Path) -> None:
    file, name = model_folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    weight = weights.pop(name)
    if value is not None:
        weights[name] = torch.full_like(weight, value)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message.format(folder=model_folder, name=name)):
        load_on_cpu(model_folder)


@pytest.mark.parametrize("config", ["[1, 2]", "{", "", "5", '{"a": ' * 2000, "another shape", "damaged weights"])
def test_a_damaged_model_is_a_config_error(model_folder: Path, config: str) -> None:
    file, weights = model_folder / "config.json", model_folder / "model.safetensors"
    if config == "damaged weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif config == "another shape":
        file.write_text(file.read_text().replace('"intermediate_size": 256', '"intermediate_size": 128'))
    else:
        file.write_text(config)
    with pytest.raises(ConfigError, match="cannot load the model from trainer"):
        load_on_cpu(model_folder)


@pytest.mark.parametrize("text", ["[1, 2]", "{", "", "{}", '{"model": 5}'])
def test_a_malformed_tokenizer_is_a_config_error(tokenizer_folder: Path, text: str) -> None:
    (tokenizer_folder / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"trainer\.policy\.model\.path="):
        load_tokenizer(str(tokenizer_folder))


def test_a_folder_without_a_tokenizer_is_refused_as_such(tiny_model_path: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model_path / name, tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_broken_chat_template_is_named_with_its_line(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    message = (
        r"the chat template of trainer\.policy\.model\.path=.* is broken in line 2.*; correct it, or set generator\."
    )
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tokenizer_folder))


@pytest.mark.parametrize("own", [None, "[{{ messages[0].content }}]", "{{ broken }"])
def test_the_chat_template_that_is_used_is_checked(tokenizer_folder: Path, own: str | None) -> None:
    file, options = tokenizer_folder / "chat_template.jinja", {"template_key": "data.chat_template"}
    if own is None:
        file.unlink()
        with pytest.raises(
            ConfigError, match=r"has no chat template; use an instruct model, or set data\.chat_template$"
        ):
            load_tokenizer(str(tokenizer_folder), **options)
    else:
        file.write_text(own)
    template = "{{ messages[0].role }}"
    tokenizer = load_tokenizer(str(tokenizer_folder), chat_template=template, replaces_template=True, **options)
    assert tokenizer.chat_template == template
    with pytest.raises(
        ConfigError, match=r"the chat template of data\.chat_template is broken in line 2: .*; correct it$"
    ):
        load_tokenizer(str(tokenizer_folder), chat_template="\n{{ a }", replaces_template=True, **options)


def test_a_model_with_fewer_tokens_than_the_policy_is_refused() -> None:
    check_vocabulary_size(101, "trainer.ref.model.path", "ref", needed=100)
    with pytest.raises(ConfigError, match=r"trainer\.ref\.model\.path=ref has 100 embeddings, fewer than"):
        check_vocabulary_size(100, "trainer.ref.model.path", "ref", needed=101)
