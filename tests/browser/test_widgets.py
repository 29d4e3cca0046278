"""In a real JupyterLab: the environment check sees this Lab, and widgets answer the keyboard."""

import json
import os
import sys

import pytest
from pages import wait_until

from lessons_lib import lab as facts

pytestmark = pytest.mark.browser

CHECK = "from lessons_lib import check_environment\n\ncheck_environment()"
WHERE = "import sys, os\n\nprint(sys.prefix)\nprint(os.environ['LESSONS_BROWSER_TEST'])"
SLIDER = """import ipywidgets as widgets

speed = widgets.FloatLogSlider(value=10, min=0, max=3, step=0.1)
shown = widgets.HTML()

def show(change=None):
    width = 1000 / speed.value
    shown.value = f'<b class="time">{width:.3f} ms</b><svg width="1000" height="9"><rect width="{width:.3f}" height="9"/></svg>'

speed.observe(show, "value")
show()
widgets.VBox([speed, shown])"""


def test_the_check_finds_one_environment_and_live_widgets(open_notebook):
    notebook = open_notebook("check.ipynb", [CHECK, WHERE])
    notebook.run_all()
    wait_until("widgets are live", lambda: facts.LIVE in notebook.outputs()[0])
    table, where = notebook.outputs()
    assert "one environment" in table and "Ready" in table and "problem" not in table
    assert facts.NOT_SHOWN not in table and facts.WAITING not in table
    prefix, mark = where.split("\n")[:2]
    assert os.path.samefile(prefix, sys.prefix) and mark == notebook.lab.mark  # this very environment, a child of this very server


def test_an_error_that_stops_the_notebook_is_told(open_notebook):
    notebook = open_notebook("fails.ipynb", ["1 / 0", "print('never')"])
    with pytest.raises(AssertionError, match="(?s)the last cell has not run.*ZeroDivisionError"):
        notebook.run_all()
    assert len(notebook.errors()) == 1


def test_a_slider_moves_by_keyboard_and_text_and_picture_follow(open_notebook):
    notebook = open_notebook("slider.ipynb", [SLIDER])
    notebook.run_all()
    time, bar = notebook.page.locator("b.time"), notebook.page.locator(".widget-html svg rect")
    assert time.inner_text() == "100.000 ms" and bar.get_attribute("width") == "100.000"
    handle = notebook.page.locator(".noUi-handle").first
    notebook.press(handle, "ArrowRight")
    wait_until("the time follows", lambda: time.inner_text() == "79.433 ms")  # 10 ** 1.1 GB/s
    assert bar.get_attribute("width") == "79.433"
    notebook.press(handle, "ArrowLeft", times=2)
    wait_until("the time follows", lambda: time.inner_text() == "125.893 ms")
    notebook.press(handle, "Home")
    wait_until("the time follows", lambda: time.inner_text() == "1000.000 ms")


def test_a_kernel_that_the_user_has_installed_does_not_shadow_the_environments_own(open_notebook, lab):
    """A "python3" in the user's own folder, of another Python, is what many machines have."""
    spec = lab.scratch / "jupyter_data_dir" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["/nowhere/python"], "display_name": "Another", "language": "python"}))
    notebook = open_notebook("shadow.ipynb", [WHERE])
    notebook.run_all()
    assert os.path.samefile(notebook.outputs()[0].splitlines()[0], sys.prefix)
    assert "Python 3 (ipykernel)" in notebook.status()
