"""How a page and its figures look: colours in light and in dark, the marks of events, the style sheet."""

from __future__ import annotations

from collections.abc import Mapping

from ..history.timeline import EVENTS

# The Okabe-Ito colours, which colour-blind people tell apart, darkened until each has a contrast of 3 on white.
LIGHT: Mapping[str, str] = {
    "text": "#1f2328",
    "muted": "#59636e",
    "grid": "#d8dee4",
    "blue": "#0072b2",
    "vermilion": "#c64f00",
    "green": "#00805f",
    "purple": "#9c4a88",
}
# Marker and colour of each kind of event; the markers alone tell them apart.
MARKS: Mapping[str, tuple[str, str]] = dict(
    zip(
        EVENTS,
        (("^", "blue"), ("X", "vermilion"), ("v", "purple"), ("o", "muted"), (">", "green"), ("s", "vermilion")),
        strict=True,
    )
)
# On a dark ground each colour is lighter, so that its contrast there is as good.
DARK: Mapping[str, str] = {
    "text": "#e6edf3",
    "muted": "#9aa5b1",
    "grid": "#343b44",
    "blue": "#58b1ea",
    "vermilion": "#ff8f4d",
    "green": "#35c99d",
    "purple": "#dd92c8",
}
GROUNDS = {"light": ("#ffffff", "#f6f8fa"), "dark": ("#0d1117", "#161b22")}  # of the page, of a panel


def mark_to_svg(event: str) -> str:
    """The mark of a kind of event alone, for a legend in a page."""
    shapes = {
        "^": '<path d="M6 1L11 11H1Z"/>',
        "X": '<path d="M1 3L3 1 6 4 9 1 11 3 8 6 11 9 9 11 6 8 3 11 1 9 4 6Z"/>',
        "v": '<path d="M6 11L11 1H1Z"/>',
        "o": '<circle cx="6" cy="6" r="4.5"/>',
        ">": '<path d="M11 6L1 1V11Z"/>',
        "s": '<path d="M1.5 1.5H10.5V10.5H1.5Z"/>',
    }
    marker, colour = MARKS[event]
    return (
        f'<svg class="mark" viewBox="0 0 12 12" aria-hidden="true" style="fill: var(--{colour})">{shapes[marker]}</svg>'
    )


def style_sheet() -> str:
    """The style sheet of a page: light, dark where the reader asks for it, light on paper."""

    def variables(colours: Mapping[str, str], scheme: str) -> str:
        ground, panel = GROUNDS[scheme]
        named = "".join(f"--{name}:{colour};" for name, colour in colours.items())
        return f":root{{{named}--ground:{ground};--panel:{panel}}}"

    light, dark = variables(LIGHT, "light"), variables(DARK, "dark")
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n{_STYLE}"


_STYLE = """\
*{box-sizing:border-box}
body{margin:0 auto;max-width:1500px;padding:1.2rem clamp(.5rem,3vw,2rem);background:var(--ground);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
h1{font-size:1.6rem;margin:0 0 .8rem;overflow-wrap:anywhere}
h1 small{font-weight:400;color:var(--muted)}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.2rem,1fr));gap:.5rem;margin:0 0 1rem}
dl div{background:var(--panel);border:1px solid var(--grid);border-radius:6px;padding:.4rem .7rem}
dt{color:var(--muted);font-size:.85rem}
dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums}
p{color:var(--muted);margin:.2rem 0}
.marks{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;list-style:none;padding:0;margin:.8rem 0}
.mark{width:.8em;height:.8em}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,370px),1fr));gap:1rem}
figure{margin:0;padding:.6rem clamp(.3rem,1vw,.7rem);background:var(--panel);border:1px solid var(--grid);border-radius:6px;break-inside:avoid}
figcaption{font-weight:600;margin-bottom:.3rem}
figure p{font-size:.85rem}
figure svg{display:block;width:100%;height:auto;font-family:inherit;stroke-linejoin:round;stroke-linecap:butt}
details{margin-top:1.2rem}
summary{font-weight:600;cursor:pointer}
.wide{overflow-x:auto;margin-top:.5rem}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .7rem .25rem 0;border-bottom:1px solid var(--grid)}
td:last-child{min-width:9rem;overflow-wrap:anywhere}
.number{white-space:nowrap;font-variant-numeric:tabular-nums}
.back{color:var(--muted)}
pre{margin:.2rem 0;font-size:.85em;white-space:pre;overflow-x:auto}
footer{margin-top:1.2rem;color:var(--muted);font-size:.85rem}
@media print{body{max-width:none;padding:0;font-size:11px}.figures{grid-template-columns:1fr 1fr}.wide,pre{overflow:visible}
pre{white-space:pre-wrap}tr{break-inside:avoid}}
"""
