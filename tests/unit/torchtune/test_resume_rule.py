"""A rule is described by the files that define it."""

import functools
import sys

import adaptive_batch.schedules.batch_rules
from adaptive_batch.torchtune.resume import described_rule


def test_the_files_of_a_rule_are_those_of_its_module_and_of_its_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("rules_of_user", "functions_of_user"):
        # monkeypatch removes the modules that are imported below.
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    functions = tmp_path / "functions_of_user.py"
    functions.write_text("def constant(rows, progress): return rows")
    rules = tmp_path / "rules_of_user.py"
    rules.write_text(
        "from functools import partial\n"
        "from functions_of_user import constant\n"
        "from adaptive_batch import steps\n"
        "by_partial = partial(partial(constant), 4)\n"
        "of_package = steps([2, 4], ['1ep'])\n"
    )

    def described(name):
        return described_rule(f"rules_of_user.{name}", key="batch_size_schedule")

    names = ("constant", "by_partial", "of_package")
    before = {name: described(name) for name in names}
    # Neither another Python nor another release of this package changes a rule.
    for module in (functools, adaptive_batch.schedules.batch_rules):
        monkeypatch.setattr(module, "__file__", str(tmp_path / "other.py"))
    assert {name: described(name) for name in names} == before
    functions.write_text("def constant(rows, progress): return 2 * rows")
    assert [name for name in names if described(name) != before[name]] == ["constant", "by_partial"]
    rules.write_text(rules.read_text() + "# changed")
    assert [name for name in names if described(name) == before[name]] == []
