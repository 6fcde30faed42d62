"""Arguments of the scripts that make tables of studies."""

from argparse import ArgumentTypeError

import pytest
from study_arguments import new_file, positive


def test_numbers_are_read_as_python_writes_them():
    assert positive("1_000_000") == 1_000_000


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "nan", "", "1e6"])
def test_what_is_no_number_of_at_least_one_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="expected a whole number of at least"):
        positive(text)


def test_a_file_needs_its_folder(tmp_path):
    assert new_file(str(tmp_path / "x.csv")) == tmp_path / "x.csv"
    with pytest.raises(ArgumentTypeError, match="there is no folder"):
        new_file(str(tmp_path / "missing" / "x.csv"))
