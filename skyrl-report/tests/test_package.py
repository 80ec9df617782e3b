import subprocess
import sys
from importlib.resources import files

HEAVY = ("torch", "transformers", "datasets", "ray", "skyrl_train", "matplotlib", "jinja2", "numpy", "pyarrow")


def test_run_files_are_read_without_heavy_packages() -> None:
    """The trainer imports these modules while it checks its configuration."""
    modules = "skyrl_report.errors, skyrl_report.run_folder, skyrl_report.metrics_file, skyrl_report.cli"
    code = f"import sys, {modules}; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_mark_of_types_exists() -> None:
    assert (files("skyrl_report") / "py.typed").is_file()
