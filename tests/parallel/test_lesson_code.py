"""What a lesson builds in its cells is what the library holds, to the letter but for docstrings, comments and annotations.

A function must be all of it; a class of a lesson may have fewer methods, each the same.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Lesson:
    """A notebook, the files of lessons_lib/parallel whose code it builds, and what it builds (words; Class.method for a method)."""

    notebook: str
    files: str
    built: str

    def __str__(self):
        return self.notebook


LESSONS = [
    Lesson(
        "02_collectives",
        "messages rooted collectives",
        "naive_broadcast binomial_broadcast chain_broadcast naive_reduce binomial_reduce naive_scatter naive_all_reduce "
        "binomial_all_reduce exchange ring_reduce_scatter ring_all_gather ring_all_reduce whole_buffer_ring_all_reduce halve "
        "double hierarchical_all_reduce all_to_all",
    ),
    Lesson(
        "03_data_parallel",
        "data buckets sharded",
        "broadcast_parameters split_batch average_gradients average_gradients_flat accumulate_gradients cut_into_buckets "
        "Buckets.__init__ Buckets.gradient_ready Buckets.start_next Buckets.wait FlatUnit.__init__ FlatUnit.gather FlatUnit.free "
        "FlatUnit.reduce_gradients Zero1.__init__ Zero1.reduce_gradients Zero1.step watch Zero2.__init__ Zero2.reduce "
        "Zero2.reduce_gradients Zero2.step Zero3.__init__ Zero3.after_forward Zero3.reduce Zero3.reduce_gradients Zero3.step "
        "clip_gradients",
    ),
    Lesson(
        "04_tensor_parallel",
        "conjugates linears tensor vocabulary replicas saved",
        "summed Enter.forward Enter.backward f Leave.forward Leave.backward g cut ColumnParallelLinear.__init__ "
        "ColumnParallelLinear.forward RowParallelLinear.__init__ RowParallelLinear.forward ParallelMLP.__init__ "
        "ParallelMLP.forward ParallelAttention.__init__ ParallelAttention.forward ParallelBlock.__init__ ParallelBlock.forward "
        "local cross_entropy gradient_norm Gather.forward Gather.backward gather_sequence Scatter.forward Scatter.backward "
        "scatter_sequence sum_replicated_gradients saved_memory",
    ),
    Lesson(
        "05_pipeline_parallel",
        "pipeline weight_gradients",
        "receive forward_step backward_step wait_for gpipe_step one_f_one_b_step as_rows add_weight_gradient",
    ),
]
BUILT = [(lesson, name) for lesson in LESSONS for name in sorted(lesson.built.split())]


def functions(source: str) -> dict[str, str]:
    """Every function of a source by name, and every method as Class.method: its code without what does not run."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _bare(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}": _bare(method) for method in node.body if isinstance(method, ast.FunctionDef)}
    return found


def _bare(function: ast.FunctionDef) -> str:
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.dump(function)


def in_library(lesson: Lesson) -> dict[str, str]:
    texts = [(ROOT / "lessons_lib" / "parallel" / f"{name}.py").read_text(encoding="utf-8") for name in lesson.files.split()]
    return {name: code for text in texts for name, code in functions(text).items()}


def in_lesson(lesson: Lesson) -> dict[str, str]:
    notebook = nbformat.read(ROOT / "notebooks" / f"{lesson.notebook}.ipynb", as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return {name: code for source in sources for name, code in functions(source).items()}


@pytest.mark.parametrize("lesson, name", BUILT, ids=lambda value: str(value))
def test_lesson_code_and_library_code_are_the_same_code(lesson, name):
    assert in_lesson(lesson)[name] == in_library(lesson)[name]


@pytest.mark.parametrize("lesson", LESSONS, ids=str)
def test_what_a_lesson_defines_under_a_name_of_the_library_is_listed(lesson):
    assert in_lesson(lesson).keys() & in_library(lesson).keys() == set(lesson.built.split())


def test_a_difference_would_be_seen():
    one, other = functions("def f(x):\n    '''Doc.'''\n    return x"), functions("def f(x):\n    return x + 0")
    assert one["f"] != other["f"] and one == functions("def f(x: int) -> int:\n    return x  # why")
    assert functions("class A:\n    def f(self):\n        return 1").keys() == {"A.f"}
    assert functions("def f(x=1):\n    return x") != functions("def f(x=2):\n    return x")
