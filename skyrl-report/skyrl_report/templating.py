"""Rendering of this package's templates."""

from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from skyrl_report.summary import format_duration


def render(template: str, **values: Any) -> str:
    """Render a template of this package."""
    environment = Environment(
        loader=PackageLoader("skyrl_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = format_duration
    environment.globals["asset"] = _read_asset
    return environment.get_template(template).render(values)


def _read_asset(name: str) -> Markup:
    """Return a script or stylesheet as it is. `include` would parse it as a template."""
    return Markup((files("skyrl_report") / "templates" / name).read_text(encoding="utf-8"))
