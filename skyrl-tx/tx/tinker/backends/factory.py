"""Create a backend by name. Other backends' packages need not be installed."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tx.flags import format_setting_errors
from tx.models.config import ModelError
from tx.tinker.backends.base import Backend
from tx.tinker.backends.config import JaxConfig, TorchConfig

BackendName = Literal["jax", "torch"]
TORCH_PACKAGES = ("skyrl_train", "torch", "transformers")  # of the extra


def settings_of(backend: BackendName, settings: Mapping[str, Any]) -> JaxConfig | TorchConfig:
    """Parse a backend's settings.

    Raises:
        ValueError: a setting is invalid, or the backend's packages are not installed.
    """
    missing = [name for name in TORCH_PACKAGES if backend == "torch" and find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is not installed; pip install ./skyrl-gym ./skyrl-report ./skyrl-train "
            "'./skyrl-tx[torch]'"
        )
    kind = TorchConfig if backend == "torch" else JaxConfig
    try:
        return kind(**settings)
    except ValidationError as error:
        known = ", ".join(kind.model_fields)
        raise ValueError(f"{format_setting_errors(error)}; {backend} knows {known}") from error


def new_backend(backend: BackendName, folder: Path, settings: Mapping[str, Any], name: str) -> Backend:
    """Create a backend with the model in a folder. Clients call the model `name`."""
    backend_config = settings_of(backend, settings)
    if isinstance(backend_config, TorchConfig):
        from tx.tinker.backends.torch.backend import TorchBackend

        return TorchBackend(folder, name, backend_config)
    from tx.tinker.backends.jax.backend import JaxBackend

    return JaxBackend(folder, name, backend_config)


def model_folder(name: str) -> Path:
    """Return a model's folder: a local folder, or a downloaded Hugging Face repository.

    Raises:
        ModelError: neither exists.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"base_model={name!r} is not a local folder, and the download from Hugging Face failed: {reason}"
        ) from error
