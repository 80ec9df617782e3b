"""Optional dependencies: the extras of skyrl-gym."""

import importlib.util


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for error messages."""
    return f"pip install './skyrl-gym[{extra}]' (in your clone of the repository)"


def require(package: str, extra: str, feature: str) -> None:
    """Raise ModuleNotFoundError, with the install command, if the package that `feature` needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{feature} need the package {package}: {install_command(extra)}")
