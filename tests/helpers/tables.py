"""Test cases in YAML files beside the test modules."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import yaml

Test = TypeVar("Test", bound=Callable[..., None])


def yaml_cases(names: str) -> Callable[[Test], Test]:
    """Parametrise a test with the rows under its name in its module's YAML file.

    Args:
        names: the test's arguments, one for each column, separated by commas. The
            last column holds what is expected; the others form the test id.
    """

    def parametrize(test: Test) -> Test:
        file = Path(sys.modules[test.__module__].__file__).with_suffix(".yaml")
        rows = yaml.safe_load(file.read_text(encoding="utf-8"))[test.__name__]
        labels = [", ".join(map(str, row[:-1])) for row in rows]
        return pytest.mark.parametrize(names, rows, ids=labels)(test)

    return parametrize
