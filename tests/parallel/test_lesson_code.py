"""The functions that lesson 02 builds in its cells are those of the library, to the letter but for docstrings."""

import ast
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("messages", "rooted", "collectives")
BUILT = {
    "naive_broadcast", "binomial_broadcast", "chain_broadcast", "naive_reduce", "binomial_reduce", "naive_scatter",
    "naive_all_reduce", "binomial_all_reduce", "exchange", "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce",
    "whole_buffer_ring_all_reduce", "halve", "double", "hierarchical_all_reduce", "all_to_all",
}  # fmt: skip


def functions(source: str) -> dict[str, str]:
    """Every function of a source by name: its code without docstrings, comments and layout."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            found[node.name] = ast.dump(node)
    return found


def in_library() -> dict[str, str]:
    texts = ((ROOT / "lessons_lib" / "parallel" / f"{name}.py").read_text(encoding="utf-8") for name in FILES)
    return {name: code for text in texts for name, code in functions(text).items()}


def in_lesson() -> dict[str, str]:
    notebook = nbformat.read(ROOT / "notebooks" / "02_collectives.ipynb", as_version=4)
    sources = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return {name: code for source in sources for name, code in functions(source).items()}


def test_the_lesson_builds_what_it_should():
    assert BUILT <= in_lesson().keys() & in_library().keys()


@pytest.mark.parametrize("name", sorted(BUILT))
def test_lesson_code_and_library_code_are_the_same_code(name):
    assert in_lesson()[name] == in_library()[name]


def test_a_difference_would_be_seen():
    one, other = functions("def f(x):\n    '''Doc.'''\n    return x"), functions("def f(x):\n    return x + 0")
    assert one["f"] != other["f"] and one == functions("def f(x):\n    return x  # why")
