"""A private name of another library has a row in private_names.csv, with the reason."""

from support.paths import ROOT
from support.private_names import names_in, read_table


def test_each_private_name_has_a_library_and_a_reason():
    rows = read_table()
    assert rows.keys() == names_in(ROOT).keys(), "new names, or rows of names that are gone"
    assert all(row["library"] and row["reason"] for row in rows.values())
