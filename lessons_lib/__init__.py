"""Parallelism by Hand: run a program on real ranks, record it, replay it on any cluster.

Public names are handed on lazily, so that `import lessons_lib` is quick and needs torch only where ranks run.
"""

import importlib
import sys
import types

_HOME = {
    "hardware": "Device Link Cluster",
    "recording": "Recording",
    "errors": "RunError RankFailed Deadlock Mismatch BufferMisuse OrderWarning",
    "replay": "replay sweep measured Timeline",
    "ranks": "run",
    "explorers": "explore guess",
    "explorers.collective_explorer": "compare_collectives",
    "explorers.pipeline_explorer": "explore_pipeline",
    "environment": "check_environment",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted(_WHERE)


def __getattr__(name):
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"lessons_lib has no {name!r}; it hands on: {', '.join(__all__)}") from None


def __dir__():
    return sorted([*globals(), *__all__])


class _Package(types.ModuleType):
    """Importing lessons_lib.replay would hide the function replay behind the module of that name: the function stays."""

    def __setattr__(self, name, value):
        if not (name in _WHERE and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
