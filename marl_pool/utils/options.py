"""Sections of a configuration whose name chooses a class; it imports no torch."""

from typing import Any


class Options(dict[str, Any]):
    """Section ``{"name": …, **options}``, whose name chooses a registered class.

    It is passed whole to a function such as `make_batched_env`, which checks it against
    the signature of that class.
    """

    @property
    def name(self) -> str:
        """Name of the class."""
        name: str = self["name"]
        return name

    @property
    def arguments(self) -> dict[str, Any]:
        """Options without the name."""
        return {key: value for key, value in self.items() if key != "name"}

    @property
    def or_none(self) -> "Options | None":
        """The section; None if its name is ``none``."""
        return None if self.name == "none" else self
