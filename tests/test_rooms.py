"""The shape of the house: which file belongs to which room, and who may call whom. Read from the import statements."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "lessons_lib"

# A room is a file or a folder of its name; these are in one room with others.
FILES = {
    "recording": "recording table",
    "formulas": "formulas messages algorithms splitting",
    "environment": "environment lab",
    "recorder": "recorder watch",
    "pipelines": "pipelines stage_costs",
    "schedules": "parallel.actions parallel.cuts parallel.known_schedules parallel.schedule_calls parallel.schedule_table "
    "parallel.schedules",
}
GROUND = {"errors", "hardware", "recording", "sources"}
MAY_CALL = {
    "errors": set(),
    "hardware": set(),
    "recording": set(),
    "sources": set(),
    "stored": set(),
    "environment": {"stored"},
    "shapes": set(),
    "schedules": set(),
    "formulas": {"hardware"},
    "activations": {"hardware", "shapes"},
    "replay": {"errors", "hardware", "recording", "formulas"},
    "planner": {"activations", "formulas", "hardware", "shapes"},
    "pipelines": {"activations", "errors", "hardware", "recording", "formulas", "shapes", "schedules"},
    "plots": {"replay", "planner", "formulas", "hardware", "recording", "schedules"},
    "explorers": {"stored", "plots", "replay", "planner", "formulas", "hardware", "recording", "shapes", "schedules", "pipelines"},
    "recorder": GROUND | {"formulas"},
    "ranks": GROUND | {"recorder"},
    "models": {"shapes"},
    "parallel": {"schedules"},
    "checks": {"*"} - {"explorers"},
}
NEEDS_TORCH = {"recorder", "ranks", "models", "parallel", "checks"}
# Timeline.plot() and its like, imported when called
THIN_CALLS = {("replay.timeline", "plots"), ("parallel.schedule_table", "plots")}
LINES = 320  # a file is one idea and fits a sitting


def modules() -> dict[str, Path]:
    """Every module of the library by its name within it: "replay" (also where that is a folder), "parallel.data"."""
    parts = {f: f.relative_to(LIBRARY).with_suffix("").parts for f in sorted(LIBRARY.rglob("*.py"))}
    return {".".join(p[:-1] if p[-1] == "__init__" and len(p) > 1 else p): f for f, p in parts.items()}


def room_of(module: str) -> str:
    first = module.split(".")[0]
    return next((room for room, files in FILES.items() if {module, first} & set(files.split())), first)


def imports_of(source: str, module: str = "x", folder: bool = False) -> list[tuple[str, bool]]:
    """What a module imports, as (name, whether only when a function is called); ours without the package's name.

    `folder`: whether the module is the front of a folder, whose relative imports start inside it.
    """
    found = []

    def look(node, called):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, called) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                inside = [*module.split("."), ""] if folder else module.split(".")
                up = inside[: -child.level] if child.level else []
                base = ".".join([*(["lessons_lib"] if child.level else []), *up, *filter(None, [child.module])])
                if base == "lessons_lib" or module.split(".")[0] == base.removeprefix("lessons_lib."):  # from . import lab
                    found.extend((f"{base}.{alias.name}", called) for alias in child.names)
                else:
                    found.append((base, called))
            look(child, called or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    look(ast.parse(source), False)
    return [(name.removeprefix("lessons_lib."), called) for name, called in found]


def ours(module: str, path: Path, when_called: bool) -> set[str]:
    names = modules()
    found = set()
    for name, called in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
        target = next((n for n in (name, name.split(".")[0]) if n in names or n in MAY_CALL), None)
        if target and target != "torch" and (when_called or not called):
            found.add(target)
    return found


def test_imports_are_read_in_every_spelling():
    source = (
        "import numpy as np\nfrom . import lab\nfrom .replay import x\nfrom lessons_lib.hardware import Link\n"
        "def f():\n    from .plots import y\n    import torch.distributed\n"
    )
    assert imports_of(source) == [
        ("numpy", False), ("lab", False), ("replay", False), ("hardware", False), ("plots", True), ("torch.distributed", True),
    ]  # fmt: skip
    assert imports_of("from .group import x\nfrom ..formulas import y", "parallel.data") == [
        ("parallel.group", False),
        ("formulas", False),
    ]


@pytest.mark.parametrize("module", [name for name in modules() if name != "__init__"])
def test_calls_go_down_the_stairs(module):
    room = room_of(module)
    assert room in MAY_CALL, f"say in {Path(__file__).name} which room {module}.py belongs to"
    for other in ours(module, modules()[module], when_called=True):
        thin = (module, other) in THIN_CALLS and other not in ours(module, modules()[module], when_called=False)
        allowed = room_of(other) in MAY_CALL[room] | {room} or ("*" in MAY_CALL[room] and room_of(other) != "explorers")
        assert allowed or thin, f"{module} (room {room}) may not import {other} (room {room_of(other)})"


def test_no_file_imports_itself_through_others():
    needs = {module: ours(module, path, when_called=False) - {module} for module, path in modules().items()}
    ready: set[str] = set()
    while more := {module for module, others in needs.items() if module not in ready and others & needs.keys() <= ready}:
        ready |= more
    assert ready == needs.keys(), f"these import each other in a circle: {sorted(needs.keys() - ready)}"


def test_the_table_of_rooms_names_only_files_that_are_there():
    assert {file for files in FILES.values() for file in files.split()} <= modules().keys()


@pytest.mark.parametrize("module", [name for name in modules() if room_of(name) not in NEEDS_TORCH])
def test_rooms_without_torch_name_it_nowhere_but_in_the_environment_check(module):
    named = [name for name, _ in imports_of(modules()[module].read_text(encoding="utf-8"), module) if name.split(".")[0] == "torch"]
    assert not named


def test_rooms_without_torch_work_where_it_is_not_installed():
    names = [name for name in modules() if room_of(name) not in NEEDS_TORCH and name != "__init__"]
    code = (
        "import sys, time, importlib\nsys.modules['torch'] = None\nstart = time.perf_counter()\nimport lessons_lib\n"
        "print(f'import lessons_lib: {time.perf_counter() - start:.3f} s; ', end='')\n"
        f"for name in {names!r}: importlib.import_module('lessons_lib.' + name)\n"
        "print(f'all rooms without torch: {time.perf_counter() - start:.3f} s (measured)')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    print(ran.stdout)


@pytest.mark.parametrize("call", ["import lessons_lib", "from lessons_lib import run", "import lessons_lib.ranks"])
def test_the_front_door_opens_without_loading_torch_or_matplotlib(call):
    code = f"import sys\n{call}\nprint(sorted(n for n in ('torch', 'matplotlib', 'ipywidgets') if n in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.returncode) == ("[]\n", 0), ran.stderr


def test_every_public_name_is_there_and_an_unknown_one_is_named():
    pytest.importorskip("torch")
    import lessons_lib

    for name in lessons_lib.__all__:
        assert getattr(lessons_lib, name) is not None
    with pytest.raises(AttributeError, match="lessons_lib has no 'runn'; it hands on: .*run"):
        lessons_lib.runn  # noqa: B018


@pytest.mark.parametrize("module", modules())
def test_a_file_fits_a_sitting(module):
    assert len(modules()[module].read_text(encoding="utf-8").splitlines()) <= LINES
