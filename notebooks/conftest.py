"""How the tests run these notebooks: as a learner's Lab does, except that prints of ranks are put in order."""

import os

import nbval.kernel

# Seconds for which lines of ranks are held back, then shown in rank order. A lesson ends well before.
HOLD = {"LESSONS_HOLD_SECONDS": "60"}

_start = nbval.kernel.start_new_kernel


def _start_with_order(*args, **options):
    return _start(*args, env={**os.environ, **HOLD}, **options)


def _execute_and_count(self, cell_input, allow_stdin=None):
    # nbval leaves cells uncounted, so that every error would name cell 1; a Lab counts them.
    return self.kc.execute(cell_input, store_history=bool(cell_input), allow_stdin=allow_stdin, stop_on_error=False)


nbval.kernel.start_new_kernel = _start_with_order
nbval.kernel.RunningKernel.execute_cell_input = _execute_and_count
