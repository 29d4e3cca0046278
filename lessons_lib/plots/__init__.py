"""Pictures of timelines: every one as SVG or matplotlib figure, and as text. This is the front door; each has a file of its own.

timeline_svg, timeline_text              a row a rank: compute, communication, idle, transfers
curve, curve_text, curve_frame           step time against bandwidth, with marks at real links
breakdown, breakdown_text, breakdown_svg where each rank's step goes
schedule_svg, pipeline_svg               a pipeline schedule, and a timeline of one: a box an action with its microbatch's number
sentence                                 the finding in words
to_perfetto                              a file for the Perfetto viewer

None of these needs torch. matplotlib is imported when `curve` or `breakdown` is first used.
"""

import importlib

from .curve_picture import breakdown_svg, curve_frame
from .perfetto import to_perfetto
from .svg import image
from .text_pictures import breakdown_text, curve_text, timeline_text
from .timeline_picture import timeline_svg
from .wording import format_time, sentence

__all__ = [
    "breakdown_svg", "breakdown_text", "curve_frame", "curve_text", "format_time", "image", "sentence", "timeline_svg",
    "timeline_text", "to_perfetto",
]  # fmt: skip
_LATER = {"breakdown": "figures", "curve": "figures", "schedule_svg": "schedule_picture", "pipeline_svg": "schedule_picture"}


def __getattr__(name):
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"lessons_lib.plots has no {name!r}; it has: {', '.join(sorted([*__all__, *_LATER]))}")
