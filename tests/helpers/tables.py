"""Cases of tests in YAML files beside their modules."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import yaml

Test = TypeVar("Test", bound=Callable[..., None])


def yaml_cases(names: str) -> Callable[[Test], Test]:
    """Parametrise a test by the rows that bear its name in its module's YAML file.

    Args:
        names: of the test's arguments, joined by commas, one for each column. All
            columns but the last, which says what is expected, name the case.
    """

    def parametrize(test: Test) -> Test:
        file = Path(sys.modules[test.__module__].__file__).with_suffix(".yaml")
        rows = yaml.safe_load(file.read_text(encoding="utf-8"))[test.__name__]
        labels = [", ".join(map(str, row[:-1])) for row in rows]
        return pytest.mark.parametrize(names, rows, ids=labels)(test)

    return parametrize
