"""How a widget shows itself: live where a kernel runs, and as a picture and text where none does.

A notebook viewer shows one form of an output, and prefers the widget even if its kernel is gone: then it says "model not
found". So a cell gets two outputs. The first is static (HTML and plain text). The second is the widget, whose own HTML holds a
style rule that hides the first: no live widget, no rule, and the picture stays. The first in turn hides an output after it that
holds no live widget. Pictures are <img>, because viewers strip inline SVG from notebooks that the reader has not trusted.
"""

from __future__ import annotations

import hashlib
from html import escape


def key_of(*content: str) -> str:
    """A name for this content: the same in every run, so that stored outputs compare equal."""
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:12]


def hiding_rule(key: str) -> str:
    """HTML for inside the live widget: hides the static output of the same key."""
    return f'<style class="live-{key}">.static-{key}{{display:none}}</style>'


def show(widget, html: str, text: str, key: str) -> None:
    """Display the static form, then the widget. What is stored is the same in every run but for the widget's random model id."""
    from IPython.display import display

    rule = f".jp-OutputArea-child:has(.static-{key}) + .jp-OutputArea-child:not(:has(.live-{key})){{display:none}}"
    static = f'<style>{rule}</style><div class="static-{key}">{html}</div>'
    display({"text/html": static, "text/plain": text}, raw=True)
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    display({"application/vnd.jupyter.widget-view+json": view, "text/plain": repr(widget)}, raw=True)


def paragraph(text: str, style: str = "") -> str:
    return f'<p style="margin:2px 0;{style}">{escape(text)}</p>'
