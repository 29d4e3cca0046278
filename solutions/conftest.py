"""The tests run solutions as they run lessons."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "notebooks" / "conftest.py"))
