"""How the tests start servers of SGLang, which run in `.venv-sglang` (`make test-sglang`)."""

from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[2] / "sglang"
PYTHON = TESTS.parents[2] / ".venv-sglang/bin/python"
COMMAND = (str(PYTHON), str(TESTS / "serve.py"))
START_TIMEOUT_S = 200.0
N_RESERVED_TOKENS = 6  # of the context, by SGLang
OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "enable_deterministic_inference": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 8192,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "log_level": "warning",
}
StartServer = Callable[..., str]
