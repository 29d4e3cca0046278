"""The way in: lint, the Makefile's choice of Python and its stamps, the README's commands, and what may stand at the top."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKE = shutil.which("make")
TOP = {"README.md", "requirements.txt", "pyproject.toml", "Makefile", "notebooks", "lessons_lib", "exercises", "solutions", "tests"}


def ruff(*arguments):
    pytest.importorskip("ruff", reason='ruff is not installed: python -m pip install -e ".[test]"')
    return subprocess.run([sys.executable, "-m", "ruff", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_lint_notebooks_included():
    ran = ruff("check", ".")
    assert ran.returncode == 0, ran.stdout


def test_format_notebooks_included():
    ran = ruff("format", "--check", ".")
    assert ran.returncode == 0, ran.stdout


def tracked_files() -> list[str]:
    ran = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        pytest.skip("not a git checkout: which files belong to the project cannot be told")
    return ran.stdout.splitlines()


def test_the_top_level_is_small():
    top = {file.split("/")[0] for file in tracked_files()}
    assert {name for name in top if not name.startswith(".")} <= TOP


def test_files_name_no_place_of_one_machine():
    """No absolute path of a home or work folder, in any text that is kept."""
    for name in tracked_files():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".cfg", ".ipynb", ""} and path.is_file() and path != Path(__file__):
            found = re.search(r"/(home|root|Users)/\w+/\w|/work/\w+/\w", path.read_text(encoding="utf-8"))
            assert not found, f"{name}: {found.group()}"


# ---- the Makefile, in a folder with spaces and letters beyond ASCII ----------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the Makefile reads, and a function that runs make there with only the given programs on the PATH."""
    if not MAKE or os.name == "nt":
        pytest.skip("needs make")
    folder = tmp_path / "my course, größer"
    folder.mkdir()
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "cat", "cksum", "sed", "grep", "rm", "id", "echo", "mkdir", "cp", "dirname"):
        (programs / name).symlink_to(shutil.which(name))

    def make(*arguments, **pythons):
        """`pythons` maps a name on the PATH (with _ for .) to the shell script that plays it."""
        for name, script in {"inner": INNER, **pythons}.items():
            file = programs / name.replace("_", ".")
            file.write_text(f"#!/bin/sh\n{script}\n")
            file.chmod(0o755)
        ran = subprocess.run([MAKE, *arguments], cwd=folder, env={"PATH": str(programs), "HOME": str(tmp_path)},
                             capture_output=True, text=True, timeout=120)  # fmt: skip
        return ran.returncode, ran.stdout + ran.stderr

    make.folder = folder
    return make


REAL = f'exec "{sys.executable}" "$@"'
TOO_OLD = 'case "$2" in *version_info*) exit 1;; esac; exit 0'
NO_ENSUREPIP = 'case "$2" in *ensurepip*) exit 1;; esac; exit 0'
INNER = '[ "$1" = -m ] && echo "$@" >> calls\nexit 0'  # what stands for .venv/bin/python: notes how it is called
PRETENDS = """if [ "$1 $2" = "-m venv" ]; then
  echo "$@" >> calls; mkdir -p .venv/bin; cp "$(dirname "$0")/inner" .venv/bin/python
fi
[ "$1" = --version ] && echo Python 3.12.0
exit 0"""


def test_no_python_at_all(checkout):
    code, said = checkout("lab")
    assert code and "No Python from 3.10 to 3.13 was found." in said and "make lab PYTHON=" in said


def test_only_pythons_that_are_too_old_or_too_new(checkout):
    code, said = checkout("test", python3=TOO_OLD, python=TOO_OLD)
    assert code and "No Python from 3.10 to 3.13 was found." in said and "make test PYTHON=" in said


def test_a_python_that_was_asked_for_and_is_not_there(checkout):
    code, said = checkout("lab", "PYTHON=python9", python3=REAL)
    assert code and "No Python from 3.10 to 3.13 in PYTHON=python9" in said


def test_a_python_of_debian_without_ensurepip(checkout):
    code, said = checkout("lab", python3=NO_ENSUREPIP)
    assert code and "python3 cannot make environments" in said and "apt install python3-venv" in said


def test_one_that_can_make_environments_is_preferred_to_one_that_cannot(checkout):
    code, said = checkout("venv", python3=NO_ENSUREPIP, python3_12=PRETENDS)
    assert code == 0 and "Making .venv with Python 3.12.0" in said


def test_lab_installs_once_and_opens_the_first_lesson(checkout):
    code, said = checkout("lab", python3=PRETENDS)
    assert code == 0, said
    calls = (checkout.folder / "calls").read_text().splitlines()
    root = " --allow-root" if os.getuid() == 0 else ""
    lab = f"-m jupyterlab{root} --ServerApp.root_dir=. notebooks/00_start_here.ipynb"
    assert calls == ["-m venv --clear .venv", "-m pip install --quiet -r requirements.txt", lab]

    code, said = checkout("lab")  # the second time nothing is installed
    calls = (checkout.folder / "calls").read_text().splitlines()[3:]
    assert code == 0 and calls == [lab] and "Install" not in said

    code, said = checkout("test")  # the tests need more, and that once too
    code, said = checkout("test")
    calls = (checkout.folder / "calls").read_text().splitlines()[4:]
    assert calls == ["-m pip install --quiet -e .[test]", "-m pytest", "-m pytest"]

    with (checkout.folder / "requirements.txt").open("a") as file:
        file.write("# another package\n")
    checkout("lab")
    calls = (checkout.folder / "calls").read_text().splitlines()[7:]
    assert calls == ["-m pip install --quiet -r requirements.txt", lab]


def test_an_installation_that_fails_is_tried_again(checkout):
    code, _ = checkout("course", python3=PRETENDS, inner='[ "$2" = pip ] && exit 1; exit 0')
    assert code and not (checkout.folder / ".venv" / "course.stamp").exists()


def test_torch_from_another_index(checkout):
    code, said = checkout("course", "TORCH_INDEX=there", python3=PRETENDS)
    calls = (checkout.folder / "calls").read_text().splitlines()
    assert code == 0 and calls[1] == "-m pip install --quiet --index-url there torch>=2.13,<2.14", said
    assert calls[2] == "-m pip install --quiet -r requirements.txt"


def test_a_real_environment_is_made_kept_and_mended(checkout):
    code, said = checkout("venv", python3=REAL)
    assert code == 0 and f"Making .venv with Python {sys.version.split()[0]}" in said
    assert checkout("venv") == (0, "")
    assert checkout("venv", f"PYTHON={sys.executable}") == (0, "")
    broken = checkout.folder / ".venv" / "bin" / "python"
    broken.unlink()
    broken.symlink_to("/nowhere/python")  # as after an update of the system's Python
    code, said = checkout("venv")
    assert code == 0 and "Making .venv" in said
    assert subprocess.run([broken, "-c", "pass"]).returncode == 0


# ---- what the README promises ------------------------------------------------------------------------------------


def test_the_readme_gives_the_commands_that_the_makefile_runs():
    readme, makefile = (ROOT / "README.md").read_text(encoding="utf-8"), (ROOT / "Makefile").read_text()
    for command in ("make lab", "make test", "-m pip install -r requirements.txt", '-m pip install -e ".[test]"', "-m pytest"):
        assert command in readme, command
    for command in ("pip install --quiet -r requirements.txt", 'pip install --quiet -e ".[test]"', "-m pytest"):
        assert command in makefile, command
    opens = "-m jupyterlab --ServerApp.root_dir=. notebooks{}00_start_here.ipynb"  # the exercises are beside the lessons' folder
    assert opens.format("/") in readme and opens.format("\\") in readme and "--ServerApp.root_dir=. " in makefile
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    for target in re.findall(r"\bmake (\w+)", readme):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the README names `make {target}`"


def test_the_readme_links_to_what_is_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for place in re.findall(r"\]\(((?!https?:|#)[^)#]+)", readme):
        assert (ROOT / place).exists(), place
    for lesson in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert f"](notebooks/{lesson.name})" in readme, f"the map of the course does not lead to {lesson.name}"
    titles = {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in re.findall(r"^#+ (.+)$", readme, re.MULTILINE)}
    for anchor in re.findall(r"\]\(#([^)]+)\)", readme):
        assert anchor in titles, anchor


def test_the_program_in_the_readme_does_what_it_says(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("ipywidgets")
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (said,) = re.findall(r"print\(recording.results\)  # (.*?), computed", program)
    (tmp_path / "program.py").write_text(program)
    ran = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True, timeout=120)  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, f"{said}\n"), ran.stderr


@pytest.mark.skipif(not os.environ.get("CI"), reason="outside CI the course need not be installed")
def test_the_course_is_importable_from_every_folder(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import lessons_lib; print(lessons_lib.__file__)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert Path(ran.stdout.strip()).parent == ROOT / "lessons_lib", ran.stderr
