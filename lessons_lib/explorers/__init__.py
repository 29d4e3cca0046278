"""Widgets: `explore` moves a link under one recording or several, `guess` takes a prediction. Each has a file of its own."""

from __future__ import annotations

from ..hardware import Cluster
from ..recording import Recording
from .choices import checked
from .explorer import Explorer
from .guesses import Guess, guess

__all__ = ["Explorer", "Guess", "explore", "guess"]


def explore(
    recording: Recording | dict[str, Recording], cluster: Cluster, name: str = "Choice", start: str | None = None
) -> Explorer:
    """A widget that replays `recording` on `cluster` and on what the reader's sliders make of it.

    A dict {text: Recording} gives one more slider, over its texts; `name` says what they are ("Bucket size"). Their world sizes may
    differ. It starts at the text `start`, by default at the first. Without a kernel the saved notebook shows that picture and the
    finding as text. Raises what `replay` raises for a recording that cannot run on this cluster.
    """
    choices = checked(recording, name)
    if not isinstance(cluster, Cluster):
        raise TypeError(f"explore needs a Cluster, such as Cluster(H100), not {cluster!r}.")
    if start is not None and (not isinstance(start, str) or start not in choices):
        raise ValueError(f"start is {start!r}; allowed is one of the choices: {', '.join(map(repr, choices))}.")
    return Explorer(choices, cluster, name.strip(), start)
