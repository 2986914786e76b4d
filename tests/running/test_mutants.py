"""What a mutant changes, and which tests it is shown to."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants

SOURCE = '''"""1 < 2."""
def between(a: int | None, b: int = 3) -> bool:
    """Whether é < 4."""
    note("é", not a); report(a); name = f"{a + 1}"
    return (a or 0) + 1 < b if b else False
'''


def test_each_mutant_changes_one_place_and_is_python() -> None:
    found = mutants.mutants(SOURCE)
    assert {(mutant.line, mutant.before, mutant.after) for mutant in found} == {
        (2, "3", "4"),
        (4, "note('é', not a)", "pass"),
        (4, "not a", "a"),
        (4, "report(a)", "pass"),
        (5, "(a or 0) + 1 < b if b else False", "False if b else (a or 0) + 1 < b"),
        (5, "(a or 0) + 1 < b", "(a or 0) + 1 <= b"),
        (5, "(a or 0) + 1", "(a or 0) - 1"),
        (5, "a or 0", "a and 0"),
        (5, "0", "1"),
        (5, "1", "2"),
        (5, "False", "True"),
    }
    for mutant in found:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(SOURCE))
        assert len(mutant.source.splitlines()) == len(SOURCE.splitlines())


def test_tests_that_import_a_module_belong_to_it(tmp_path: Path) -> None:
    tests, package = tmp_path / "tests", tmp_path / "operator/modelserve/sizing"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from modelserve.sizing.pages import (\n    Page,\n)\n")
    (package.parent / "__init__.py").write_text("")
    for name, text in {
        "core/test_a.py": "from modelserve.sizing import pages\n",
        "core/test_b.py": "from modelserve.sizing.pages import Page\n",
        "core/test_c.py": "import modelserve.sizing.pages_of\nfrom modelserve.sizing import weights\n",
        "core/test_f.py": "from modelserve.sizing import (\n    Page,\n    weights,\n)\n",
        "core/test_g.py": "def test():\n    import modelserve.sizing.pages\n",
        "e2e/test_d.py": "import modelserve.sizing.pages\n",
        "cluster/test_e.py": "import modelserve.sizing.pages\npytestmark = pytest.mark.e2e\n",
    }.items():
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        (tests / name).write_text(text)
    assert mutants.tests_of("operator/modelserve/sizing/pages.py", tests) == [
        "tests/core/test_a.py",
        "tests/core/test_b.py",
        "tests/core/test_f.py",
        "tests/core/test_g.py",
    ]
