"""The environment check: what it says when all is well, and one test for each thing that can be wrong."""

import builtins
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

from lessons_lib import check_environment, environment, lab
from lessons_lib.environment import OK, PROBLEM, WARNING, Check, Environment

ROOT = Path(__file__).resolve().parents[1]


def fake_torch(version="2.13.0", available=True, gloo=True):
    distributed = types.SimpleNamespace(is_available=lambda: available, is_gloo_available=lambda: gloo)
    return types.SimpleNamespace(__version__=version, distributed=distributed)


@pytest.fixture
def replace_import(monkeypatch):
    """replace_import(name, module) makes `name` importable as `module`; an exception is raised instead."""
    real = importlib.import_module

    def replace(name, module):
        def fake(wanted, *rest):
            if wanted != name:
                return real(wanted, *rest)
            if isinstance(module, Exception):
                raise module
            return module

        monkeypatch.setattr(importlib, "import_module", fake)

    return replace


# ---- the whole ---------------------------------------------------------------------------------------------------


def test_here_the_environment_is_ready():
    pytest.importorskip("torch")
    found = check_environment()
    assert found.ready, repr(found)
    assert [check.name for check in found.checks] == [
        "Python", "PyTorch", "Other packages", "The course", "Kernel and Lab", "Widgets", "Processor cores", "Free memory",
        "Loopback", "Temporary folder",
    ]  # fmt: skip


def test_words_symbols_and_verdict():
    found = Environment(
        (Check("A", OK, "fine"), Check("B", WARNING, "small <1", "buy more"), Check("C", PROBLEM, "gone", "get it"))
    )
    assert repr(found).splitlines() == [
        "✓ OK       A  fine",
        "! warning  B  small <1",
        "              What to do: buy more",
        "✗ problem  C  gone",
        "              What to do: get it",
        "Not ready yet: 1 problem and 1 warning. Do what stands beside each, restart the kernel, and run this cell again.",
    ]
    page = found._repr_html_()
    assert "small &lt;1<br><b>What to do:</b> buy more" in page and "✗&nbsp;problem" in page
    assert not found.ready
    assert Environment(found.checks[:2]).verdict.startswith("Ready, with 1 warning:")
    assert Environment(found.checks[:2]).ready
    assert Environment(found.checks[:1]).verdict == "Ready: everything is in place."


def test_an_unforeseen_failure_is_reported_and_not_raised(monkeypatch):
    def broken():
        raise RuntimeError("no such luck")

    monkeypatch.setattr(environment, "check_cores", broken)
    check = next(check for check in check_environment().checks if check.name == "Processor cores")
    assert check.state == WARNING and "RuntimeError: no such luck" in check.found and check.advice


def test_it_runs_and_says_so_where_torch_and_ipywidgets_are_not_installed():
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['ipywidgets'] = None\n"
        "from lessons_lib import check_environment\nprint(check_environment())"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120,
                         env={**os.environ, "PYTHONIOENCODING": "utf-8"})  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "✗ problem  PyTorch           not installed in this kernel's environment" in ran.stdout
    assert "✗ problem  Widgets           ipywidgets cannot be imported" in ran.stdout
    assert "Not ready yet: 2 problems" in ran.stdout


def test_it_runs_on_a_bare_python_and_names_all_that_is_missing():
    """What a kernel of another environment has: no package at all."""
    code = f"import sys\nsys.path.append({str(ROOT)!r})\nfrom lessons_lib import check_environment\nprint(check_environment())"
    ran = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, encoding="utf-8", timeout=120,
                         env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": ""})  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "✗ problem  PyTorch           not installed" in ran.stdout and "✗ problem  Widgets" in ran.stdout
    missing = "numpy, matplotlib, cloudpickle, psutil"
    assert f"✗ problem  Other packages    not installed in this kernel's environment: {missing}\n" in ran.stdout
    assert "✓ OK       The course        installed" in ran.stdout  # found by an absolute path, as every lesson would
    assert "! warning  Free memory       could not be told" in ran.stdout


def test_the_ranges_it_checks_are_those_that_are_installed():
    required = (ROOT / "requirements.txt").read_text()
    major, minor = environment.TORCH
    assert f"torch>={major}.{minor},<{major}.{minor + 1} " in required
    assert f"ipywidgets>={environment.IPYWIDGETS}.1,<{environment.IPYWIDGETS + 1} " in required
    (first, last) = (".".join(map(str, version)) for version in environment.PYTHON)
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={first},<3.{environment.PYTHON[1][1] + 1}"' in project
    assert f"({environment.PYTHON[0][0]}, {environment.PYTHON[0][1]}) <=" in (ROOT / "Makefile").read_text()
    assert f"<= ({environment.PYTHON[1][0]}, {environment.PYTHON[1][1]})" in (ROOT / "Makefile").read_text()


# ---- one look each -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version, state",
    [((3, 9, 18), PROBLEM), ((3, 10, 0), OK), ((3, 11, 7), OK), ((3, 13, 9), OK), ((3, 14, 0), WARNING)],
)
def test_python(monkeypatch, version, state):
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(environment.platform, "python_version", lambda: ".".join(map(str, version)))
    check = environment.check_python()
    assert check.state == state and check.found.startswith(f"Python {'.'.join(map(str, version))} on ")
    assert bool(check.advice) == (state != OK)


@pytest.mark.parametrize(
    "module, state, says",
    [
        (fake_torch("2.13.0+cpu"), OK, "PyTorch 2.13.0+cpu with gloo"),
        (fake_torch("2.13.1"), OK, "PyTorch 2.13.1 with gloo"),
        (fake_torch("2.14.1+cu130"), WARNING, "PyTorch 2.14.1+cu130"),
        (fake_torch("2.9.0"), WARNING, "PyTorch 2.9.0"),
        (fake_torch("strange"), WARNING, "PyTorch strange"),
        (fake_torch(gloo=False), PROBLEM, "without torch.distributed and gloo"),
        (fake_torch(available=False), PROBLEM, "without torch.distributed and gloo"),
        (ModuleNotFoundError("No module named 'torch'"), PROBLEM, "not installed in this kernel's environment"),
        (OSError("libtorch.so: cannot open"), PROBLEM, "importing it fails: OSError: libtorch.so: cannot open"),
    ],
)
def test_torch(replace_import, module, state, says):
    replace_import("torch", module)
    check = environment.check_torch()
    assert check.state == state and says in check.found
    assert bool(check.advice) == (state != OK)


def test_other_packages(monkeypatch):
    names = ("numpy", "matplotlib", "cloudpickle", "psutil")
    assert environment.check_packages() == Check("Other packages", OK, ", ".join(names))
    required = (ROOT / "requirements.txt").read_text()
    assert all(f"\n{name}>=" in required for name in names)
    monkeypatch.setattr(environment, "PACKAGES", ("numpy", "no_such_package"))
    check = environment.check_packages()
    assert check.state == PROBLEM and check.found.endswith(": no_such_package") and "requirements.txt" in check.advice


def test_a_course_that_only_this_notebook_finds(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_installed", lambda _: False)
    monkeypatch.setattr(sys, "path", ["", "..", str(tmp_path)])
    check = environment.check_course()
    assert check.state == WARNING and "not installed" in check.found and "requirements.txt" in check.advice
    monkeypatch.setattr(sys, "path", ["..", str(ROOT)])
    assert environment.check_course().state == OK
    monkeypatch.setattr(sys, "path", [".."])
    monkeypatch.setattr(environment, "_installed", lambda project: project == "parallelism-by-hand")
    assert environment.check_course().state == OK


@pytest.mark.parametrize(
    "where, says", [("colab", "Colab"), ("vscode", "VS Code"), ("kaggle", "Kaggle"), ("terminal", "not in a notebook")]
)
def test_kernel_elsewhere_has_no_lab_to_agree_with(monkeypatch, where, says):
    monkeypatch.setattr(lab, "shown_by", lambda: where)
    monkeypatch.setattr(lab, "server_environment", lambda: Path("/somewhere/else"))
    check = environment.check_kernel()
    assert check.state == OK and says in check.found


def test_kernel_and_lab_in_one_environment_in_two_and_untold(monkeypatch, tmp_path):
    monkeypatch.setattr(lab, "shown_by", lambda: "jupyter")
    monkeypatch.setattr(lab, "server_environment", lambda: Path(sys.prefix))
    assert environment.check_kernel() == Check("Kernel and Lab", OK, "one environment")
    monkeypatch.setattr(lab, "server_environment", lambda: None)
    assert environment.check_kernel().state == OK
    monkeypatch.setattr(lab, "server_environment", lambda: tmp_path)
    monkeypatch.setattr(lab, "widgets_in_lab", lambda _: None)
    check = environment.check_kernel()
    assert check.state == PROBLEM and str(tmp_path) in check.found and sys.prefix in check.found and "make lab" in check.advice
    monkeypatch.setattr(lab, "widgets_in_lab", lambda _: "5.0.16")  # widgets can work, so it is no more than a warning
    assert environment.check_kernel().state == WARNING


@pytest.mark.parametrize(
    "version, extension, state, says",
    [
        ("8.1.9", "5.0.16", OK, "the Lab's extension is 5.0.16"),
        ("8.1.9", None, PROBLEM, "has no widgets extension"),
        ("8.1.9", "3.1.11", PROBLEM, "the Lab's extension is 3.1.11"),
        ("7.7.2", "5.0.16", PROBLEM, "ipywidgets 7.7.2"),
    ],
)
def test_widgets(monkeypatch, replace_import, version, extension, state, says):
    replace_import("ipywidgets", types.SimpleNamespace(__version__=version))
    monkeypatch.setattr(lab, "shown_by", lambda: "jupyter")
    monkeypatch.setattr(lab, "server_environment", lambda: Path("/lab"))
    monkeypatch.setattr(lab, "widgets_in_lab", lambda _: extension)
    check = environment.check_widgets()
    assert check.state == state and says in check.found
    assert bool(check.advice) == (state != OK)


def test_widgets_not_installed(replace_import):
    replace_import("ipywidgets", ImportError("No module named 'ipywidgets'"))
    check = environment.check_widgets()
    assert check.state == PROBLEM and "No module named 'ipywidgets'" in check.found and "requirements.txt" in check.advice


def test_cores(monkeypatch):
    assert 1 <= environment.usable_cores() <= os.cpu_count()
    monkeypatch.setattr(environment, "usable_cores", lambda: 1)
    assert environment.check_cores().state == WARNING
    monkeypatch.setattr(environment, "usable_cores", lambda: 2)
    assert environment.check_cores() == Check("Processor cores", OK, "2 cores")


def test_memory(monkeypatch):
    assert environment.free_memory() > 0
    monkeypatch.setattr(environment, "free_memory", lambda: 0.8e9)
    check = environment.check_memory()
    assert (check.state, check.found) == (WARNING, "0.8 GB") and "1.5 GB" in check.advice
    monkeypatch.setattr(environment, "free_memory", lambda: 16e9)
    assert environment.check_memory() == Check("Free memory", OK, "16 GB or more")
    monkeypatch.setattr(environment, "free_memory", lambda: 1.6e9)
    assert environment.check_memory() == Check("Free memory", OK, "1 GB or more")


def test_a_container_may_have_less_memory_than_its_machine(monkeypatch):
    files = {"memory.max": "1000000000\n", "memory.current": "400000000\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, *rest, **more: files[self.name])
    assert environment.free_memory() == 6e8
    files["memory.max"] = "max\n"
    assert environment.free_memory() > 6e8


def test_loopback(monkeypatch):
    assert environment.check_loopback() == Check("Loopback", OK, "a message to this machine itself arrived")

    def refused(*_, **__):
        raise ConnectionRefusedError("refused by the firewall")

    monkeypatch.setattr(socket, "create_connection", refused)
    check = environment.check_loopback()
    assert check.state == PROBLEM and "refused by the firewall" in check.found and "firewall" in check.advice


def test_temporary_folder(monkeypatch):
    assert environment.check_temporary_folder() == Check("Temporary folder", OK, "can be written")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    check = environment.check_temporary_folder()
    assert check.state == PROBLEM and "No space left on device" in check.found and "TMPDIR" in check.advice


# ---- which Lab is this kernel's ----------------------------------------------------------------------------------


def make_environment(folder: Path, scripts="bin", extension=None) -> Path:
    (folder / scripts).mkdir(parents=True)
    if extension:
        place = folder / "share" / "jupyter" / "labextensions" / "@jupyter-widgets" / "jupyterlab-manager"
        place.mkdir(parents=True)
        (place / "package.json").write_text(json.dumps({"version": extension}))
    return folder


def test_the_environment_of_a_server_from_each_trace_that_it_leaves(tmp_path):
    mine, other = make_environment(tmp_path / "a b"), make_environment(tmp_path / "other")
    python = str(mine / "bin" / "python")
    of = lab.environment_of
    assert of([python, "-m", "jupyterlab"], {}, "/") == mine
    assert of(["a b/bin/python", "-m", "jupyterlab"], {}, str(tmp_path)) == mine  # started by a relative name
    assert of([str(other / "bin" / "python"), str(mine / "bin" / "jupyter-lab")], {}, "/") == mine  # the script's is meant
    # Python on macOS runs as an application of the framework and names its launcher
    framework = "/Library/Frameworks/Python.framework/Versions/3.12/Resources/Python.app/Contents/MacOS/Python"
    assert of([framework, "-m", "jupyterlab"], {"__PYVENV_LAUNCHER__": python}, "/") == mine
    assert of([framework, "-m", "jupyterlab"], {}, "/") is None
    conda = make_environment(tmp_path / "conda", "Scripts")
    (conda / "conda-meta").mkdir()
    assert of([str(conda / "python.exe"), "-m", "jupyterlab"], {}, "/") == conda
    assert of([str(conda / "python.exe"), str(conda / "Scripts" / "jupyter-lab-script.py")], {}, "/") == conda


def test_the_server_is_found_among_the_ancestors(monkeypatch, tmp_path):
    psutil = pytest.importorskip("psutil")
    mine = make_environment(tmp_path / "mine")

    def process(*command):
        return types.SimpleNamespace(cmdline=lambda: list(command), environ=dict, cwd=lambda: "/")

    launcher = process("python", "-m", "ipykernel_launcher", "-f", "/run/jupyter/kernel-1.json")  # Windows starts it through one
    server = process(str(mine / "bin" / "python"), "-m", "jupyterlab")
    monkeypatch.setattr(psutil, "Process", lambda: types.SimpleNamespace(parents=lambda: [launcher, server]))
    assert lab.server_environment() == mine
    monkeypatch.setattr(psutil, "Process", lambda: types.SimpleNamespace(parents=lambda: [process("/bin/bash"), process("init")]))
    assert lab.server_environment() is None

    def gone():
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil, "Process", gone)
    assert lab.server_environment() is None


def test_the_widgets_extension_of_a_lab(monkeypatch, tmp_path):
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "nothing"))
    assert lab.widgets_in_lab(make_environment(tmp_path / "with", extension="5.0.16")) == "5.0.16"
    bare = make_environment(tmp_path / "without")
    assert lab.widgets_in_lab(bare) is None
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "with" / "share" / "jupyter"))  # installed for the user
    assert lab.widgets_in_lab(bare) == "5.0.16"


def test_who_shows_the_notebook(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("VSCODE_", "COLAB_", "KAGGLE_"))]:
        monkeypatch.delenv(name)
    assert lab.shown_by() == "terminal"
    shell = types.SimpleNamespace(kernel=object(), user_ns={})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert lab.shown_by() == "jupyter"
    monkeypatch.setenv("VSCODE_PID", "1")
    monkeypatch.setattr(lab, "server_environment", lambda: None)
    assert lab.shown_by() == "vscode"
    monkeypatch.setattr(lab, "server_environment", lambda: Path("/lab"))  # started from a terminal in VS Code
    assert lab.shown_by() == "jupyter"
    shell.user_ns["__vsc_ipynb_file__"] = "lesson.ipynb"
    assert lab.shown_by() == "vscode"
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-1")
    assert lab.shown_by() == "colab"


def test_the_line_on_widgets_turns_when_the_page_answers():
    pytest.importorskip("ipywidgets")
    line = lab._answering_line("key")
    assert lab.WAITING in line.value and "static-key" in line.value
    line.set_state({"_view_count": 1})  # what a page sends when it has drawn the line
    assert lab.LIVE in line.value and lab.WAITING not in line.value and "static-key" in line.value


def test_where_no_widget_can_be_shown_the_line_says_so(monkeypatch):
    shown = []
    display = pytest.importorskip("IPython.display")
    monkeypatch.setattr(display, "display", lambda bundle, raw: shown.append(bundle))
    lab.display_liveness()
    assert [set(bundle) for bundle in shown] == [
        {"text/html", "text/plain"},  # what stays in a page that shows no widgets
        {"application/vnd.jupyter.widget-view+json", "text/plain"},
    ]
    assert shown[0]["text/plain"] == lab.NOT_SHOWN and lab.NOT_SHOWN in shown[0]["text/html"]

    def no_widgets(name, *rest, real=builtins.__import__):
        if name == "ipywidgets":
            raise ImportError("No module named 'ipywidgets'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_widgets)
    lab.display_liveness()
    assert shown[2]["text/plain"] == lab.NOT_SHOWN and lab.NOT_SHOWN in shown[2]["text/html"] and len(shown) == 3
