"""One labelled part of a recording as a recording of its own."""

from dataclasses import replace

import numpy as np

from lessons_lib.recording import WAIT


def part(recording, label):
    """What every rank did under record_function(label). The part must be waited for within itself."""
    number = recording.labels.index(label)
    events = []
    for rows in recording.events:
        mine = rows["label"] == number
        new_index = np.cumsum(mine) - 1
        kept = rows[mine].copy()
        waits = kept["kind"] == WAIT
        assert mine[kept["target"][waits]].all()
        kept["target"][waits] = new_index[kept["target"][waits]]
        events.append(kept)
    return replace(recording, events=events)
