"""What the bandwidth widget chooses from: one recording or several by name, and their prices on a cluster, kept while they hold.

One sweep over the notches of the bandwidth slider prices every choice at all of them at once, so a move of the bandwidth looks
its step times up; a sweep is due only when something else of the cluster changes.
"""

from __future__ import annotations

from dataclasses import replace as changed

import numpy as np

from ..hardware import Cluster
from ..plots.wording import totals
from ..recording import Recording
from ..replay import replay, sweep

MOST = 24  # choices that a picture can hold
NEAR = 1e-12  # bandwidths as near as this, relatively, are the same: the browser computes 10**x with another last digit


def checked(recordings, name) -> dict[str, Recording]:
    """The recordings by their text; a single one is a choice with an empty name. TypeError or ValueError says what is allowed."""
    if not isinstance(name, str) or not name.strip():
        raise TypeError(f'name is {name!r}; allowed is a text that says what the choices are, such as "Bucket size".')
    if isinstance(recordings, Recording):
        return {"": recordings}
    if not isinstance(recordings, dict):
        raise TypeError(
            f"explore needs a Recording, which run(...) returns or Recording.load(path) reads, not {recordings!r}; "
            'or several to choose from: {"1 MB": a_recording, "25 MB": another}.'
        )
    if not 1 <= len(recordings) <= MOST:
        what = f"holds {len(recordings)} recordings" if recordings else "is empty"
        raise ValueError(
            f'The dict given to explore {what}; allowed are 1 to {MOST}: {{"1 MB": recording, "25 MB": another}}, say.'
        )
    for key, value in recordings.items():
        if not isinstance(key, str) or not key.strip():
            example = str(key).strip() or "25 MB"
            raise TypeError(f"A key of the dict given to explore is {key!r}; allowed is a text that names the choice: {example!r}.")
        if not isinstance(value, Recording):
            raise TypeError(f"The choice {key!r} is {value!r}; allowed is a Recording, which run(...) returns.")
    return dict(recordings)


class Prices:
    """Step times (seconds) of the choices on a cluster. An error of a recording among several says whose it is."""

    def __init__(self, choices: dict[str, Recording], bandwidths: dict[str, np.ndarray]):
        """`bandwidths` (bytes/s, rising): for each link the notches of its slider."""
        self.choices, self.bandwidths = choices, bandwidths
        self._key, self._times, self._compute = None, None, {}

    def over(self, cluster: Cluster, link: str) -> np.ndarray:
        """choices x notches: step times with each bandwidth on that link of the cluster."""
        key = (link, changed(cluster, **{link: changed(getattr(cluster, link), bandwidth=1.0, name="")}))
        if key != self._key:
            lanes = self.bandwidths[link]
            self._times = self._each(lambda recording: sweep(recording, cluster, link=link, bandwidths=lanes))
            self._key = key
        return self._times

    def here(self, cluster: Cluster, link: str) -> np.ndarray:
        """Step time of each choice on the cluster as it is."""
        times, lanes, now = self.over(cluster, link), self.bandwidths[link], getattr(cluster, link).bandwidth
        k = int(np.abs(lanes - now).argmin())
        if abs(lanes[k] - now) <= NEAR * now:
            return times[:, k]
        return self._each(lambda recording: sweep(recording, cluster, link=link, bandwidths=now))

    def compute(self, cluster: Cluster) -> np.ndarray:
        """Seconds that each choice computes, mean over its ranks: they depend on the device alone."""
        if cluster.device not in self._compute:
            self._compute[cluster.device] = self._each(lambda recording: totals(replay(recording, cluster))[:, 0].mean())
        return self._compute[cluster.device]

    def _each(self, price) -> np.ndarray:
        out = []
        for name, recording in self.choices.items():
            try:
                out.append(price(recording))
            except Exception as error:
                if name:
                    error.args = (f"The choice {name!r}: {error}", *error.args[1:])
                raise
        return np.array(out)
