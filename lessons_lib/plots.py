"""Pictures of timelines: every one as SVG or matplotlib figure, and as text. This is the front door; each has a file of its own.

timeline, timeline_svg, timeline_text    a row a rank: compute, communication, idle, transfers
curve, curve_text, curve_frame           step time against bandwidth, with marks at real links
breakdown, breakdown_text, breakdown_svg where each rank's step goes
sentence                                 the finding in words
to_perfetto                              a file for the Perfetto viewer

None of these needs torch. matplotlib is imported when `curve` or `breakdown` is first used.
"""

from pathlib import Path

from .curve_picture import breakdown_svg, curve_frame
from .perfetto import to_perfetto
from .text_pictures import breakdown_text, curve_text, timeline_text
from .timeline_picture import timeline_svg
from .wording import format_time, sentence

__all__ = [
    "breakdown_svg", "breakdown_text", "curve_frame", "curve_text", "format_time", "sentence", "timeline", "timeline_svg",
    "timeline_text", "to_perfetto",
]  # fmt: skip
_FIGURES = ("breakdown", "curve")


class SvgPicture:
    """A picture that shows itself in a notebook as `svg` and prints as `text`."""

    def __init__(self, svg: str, text: str):
        self.svg, self.text = svg, text

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self.text

    def save(self, path) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")


def timeline(timeline, width: int = 760, until: float | None = None, ranks=None) -> SvgPicture:
    """The timeline as a picture that shows itself; the options are those of `timeline_svg`."""
    return SvgPicture(timeline_svg(timeline, width, until, ranks), timeline_text(timeline, ranks=ranks))


def __getattr__(name):
    if name in _FIGURES:
        from . import figures

        return getattr(figures, name)
    raise AttributeError(f"lessons_lib.plots has no {name!r}; it has: {', '.join(sorted([*__all__, *_FIGURES]))}")
