"""Rendering of this package's templates."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

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
    return environment.get_template(template).render(values)
