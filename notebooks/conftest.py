"""How the tests run these notebooks: as a learner's Lab does, except that prints of ranks are put in order."""

import sys
from pathlib import Path

import nbval.kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from store_outputs import kernel_environment  # noqa: E402

_start = getattr(nbval.kernel.start_new_kernel, "plain", nbval.kernel.start_new_kernel)  # solutions/ load this file, too


def _start_with_order(*args, **options):
    return _start(*args, env=kernel_environment(), **options)


def _execute_and_count(self, cell_input, allow_stdin=None):
    # nbval leaves cells uncounted, so that every error would name cell 1; a Lab counts them.
    return self.kc.execute(cell_input, store_history=bool(cell_input), allow_stdin=allow_stdin, stop_on_error=False)


_start_with_order.plain = _start
nbval.kernel.start_new_kernel = _start_with_order
nbval.kernel.RunningKernel.execute_cell_input = _execute_and_count
