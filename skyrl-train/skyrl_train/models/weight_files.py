"""The weight files of a model folder. Imports neither torch nor transformers."""

import difflib
import json
from pathlib import Path

INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


def find_folder(path: str) -> Path | None:
    """Return the folder of a model, which may be in the Hub's cache. Return None if it is not on this machine."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except ValueError:  # not a name on the Hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def suggest_folder(path: str) -> str:
    """Return a sentence that suggests a sibling with a similar name, or "" if there is none or `path` exists."""
    folder = Path(path)
    try:
        if folder.exists():
            return ""
        siblings = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()]
    except (OSError, ValueError):  # ValueError: a NUL character
        return ""
    nearest = difflib.get_close_matches(folder.name, siblings, n=1)
    return f" Did you mean {str(folder.parent / nearest[0])!r}?" if nearest else ""


def list_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in a folder, an empty list if it has none.

    Other safetensors files are left out: Mistral's `consolidated.safetensors` repeats the weights under other names.
    """
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return sorted(folder / name for name in set(weight_map.values()))
    return [folder / SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else []


def find_damaged_weights(folder: Path) -> str | None:
    """Return why a model's safetensors files are incomplete and how to fix it, or None if they are complete.

    An interrupted download leaves such files. Only headers are read.
    """
    again = "download or save the model again"
    try:
        for file in list_weight_files(folder):
            if not file.is_file():
                return f"{file.name} is missing; {again}"
            with file.open("rb") as opened:
                start = opened.read(8)
                if start == b"version ":
                    return f"{file.name} is a Git LFS pointer; run git lfs pull"
                n_header, n_bytes = int.from_bytes(start, "little"), file.stat().st_size - 8
                header = json.loads(opened.read(n_header)) if n_header <= n_bytes else {}
            ends = (tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
            if n_bytes < n_header + max(ends, default=0):
                return f"{file.name} is cut off after {n_bytes + 8:,} bytes; {again}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"the safetensors files cannot be read ({error}); {again}"
    return None
