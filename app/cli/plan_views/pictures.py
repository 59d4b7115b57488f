"""Shared by the pictures of a plan: saving, lighter colours, and legible text on a colour."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import matplotlib
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from app.own_files import replaced, write_whole

Colour = tuple[float, float, float]  # red, green, blue; 0 to 1

LUMA = (0.299, 0.587, 0.114)  # perceived brightness of red, green and blue (Rec. 601)
DARK = 0.55  # text on darker colours is white
DPI = 110  # pixels per inch


def save_picture(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write name.svg and name.png into an existing folder. Raises OSError."""
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    write_whole(paths[0], svg_of(figure, name))
    with replaced(paths[1]) as temporary:
        figure.savefig(temporary, dpi=DPI)
    return paths


def svg_of(figure: Figure, name: str) -> str:
    """Return the figure as SVG; equal figures of one name give equal text."""
    # Text stays text; a fixed salt for ids, no date.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        svg = StringIO()
        figure.savefig(svg, format="svg", dpi=DPI, metadata={"Date": None})
    return shortened(svg.getvalue())


def shortened(svg: str) -> str:
    """Return matplotlib's SVG with coordinates of one decimal, a tenth of a point, lines along an
    axis as H and V, and without prologue, metadata, line breaks, rotations by 0, and the fonts
    between the first and the last.
    """
    svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*\n\s*(?=[LzMCQ\"<])", "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", svg)
    svg = re.sub(r"(font-family: '[^']*'), [^;\"]*(?=, sans-serif)", r"\1", svg)

    def rounded(tag: re.Match[str]) -> str:
        # shares and scales, which are below 1, keep their digits
        return re.sub(r"\b[1-9]\d*\.\d{2,}", lambda found: f"{float(found[0]):.1f}", tag[0])

    svg = re.sub(r"<[^>]*>", rounded, svg)
    svg = re.sub(r'(?<= d=")(?:[ML] ?[\d.-]+ [\d.-]+ ?|z ?)+(?=")', _axis_lines, svg)
    return svg.rstrip() + "\n"


def _axis_lines(path: re.Match[str]) -> str:
    """Return an SVG path of M, L and z with H and V where only x or only y changes."""
    parts, x, y = [], "", ""
    for command, then_x, then_y in re.findall(r"([MLz]) ?([\d.-]+)? ?([\d.-]+)?", path[0]):
        if command == "L" and then_y == y:
            parts.append(f"H{then_x}")
        elif command == "L" and then_x == x:
            parts.append(f"V{then_y}")
        else:
            parts.append(f"{command}{then_x} {then_y}".strip())
        x, y = then_x, then_y
    return "".join(parts)


def whitened(colour: str | Colour, white: float) -> Colour:
    """Return the colour mixed with a share of white, 0 to 1."""
    red, green, blue = (part + (1 - part) * white for part in to_rgb(colour))
    return red, green, blue


def ink(fill: str | Colour) -> str:
    """Return black or white, whichever is legible on a colour."""
    light = sum(part * share for part, share in zip(to_rgb(fill), LUMA, strict=True))
    return "white" if light < DARK else "black"
