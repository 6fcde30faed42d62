"""Templates of cards and pages, which lie beside their modules."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


def template(
    package: str,
    name: str,
    *,
    autoescape: bool,
    filters: Iterable[Callable[..., Any]] = (),
) -> "Template":
    """Read a template of a package; a missing variable is an error when it renders."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {function.__name__: function for function in filters}
    return environment.get_template(name)
