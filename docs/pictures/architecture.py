"""Draws docs/architecture.svg: how one training script becomes trainers and parameter servers.

::

    python docs/pictures/architecture.py            writes docs/architecture.svg
    python docs/pictures/architecture.py --print    prints it
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parent.parent / "architecture.svg"
WIDTH, HEIGHT = 960, 560
INK, GREY, WHITE = "#1f2933", "#616e7c", "#ffffff"
# (background, border, accent) of each package's band
TRANSPILER = ("#f3f0ff", "#b8a9f0", "#6741d9")
TRAINER = ("#e7f5ff", "#9fd0f5", "#1971c2")
PSERVER = ("#ebfbee", "#a3d9b1", "#2b8a3e")

Band = tuple[str, str, str]


def text(
    x: float,
    y: float,
    words: str,
    size: float = 13,
    color: str = INK,
    weight: int = 400,
    anchor: str = "middle",
) -> str:
    """One line of text around, or from, a point."""
    style = f'font-size="{size:g}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def box(
    x: float, y: float, width: float, height: float, fill: str, border: str, radius: float = 8
) -> str:
    """A rectangle with round corners."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
    return f'<rect {size} fill="{fill}" stroke="{border}" stroke-width="1.5"/>'


def band(
    x: float, y: float, width: float, height: float, colors: Band, name: str, what: str
) -> str:
    """A package: its name, and what it does in a few words."""
    title = text(x + 16, y + 25, name, 15, colors[2], 700, "start")
    says = text(x + 24 + 9.2 * len(name), y + 25, what, 12.5, GREY, anchor="start")
    return box(x, y, width, height, colors[0], colors[1], 12) + title + says


def pill(x: float, y: float, width: float, words: str, color: str) -> str:
    """A small part of a box."""
    return box(x, y, width, 26, WHITE, color, 13) + text(x + width / 2, y + 17.5, words, 12.5)


def arrow(points: str, color: str) -> str:
    """A line with a head at its end."""
    head = f'marker-end="url(#head-{color[1:]})"'
    return f'<path d="{points}" fill="none" stroke="{color}" stroke-width="1.8" {head}/>'


def head(color: str) -> str:
    """The head of arrows of a color."""
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    shape = f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{color}"/>'
    return f'<marker id="head-{color[1:]}" {size}>{shape}</marker>'


def transpiler() -> str:
    """The upper band: a script, its program, and the two halves of the program."""
    drawn = band(20, 16, 920, 158, TRANSPILER, "transpiler", "pure graph work")
    drawn += box(40, 62, 190, 84, WHITE, TRANSPILER[1])
    drawn += text(135, 88, "training script", 14, weight=600)
    drawn += text(135, 110, "model, loss, optimizer", 12.5, GREY)
    drawn += text(135, 129, "plain PyTorch, one process", 12.5, GREY)
    drawn += arrow("M 230 104 H 316", TRANSPILER[2]) + text(272, 96, "capture", 12.5, TRANSPILER[2])
    drawn += box(320, 62, 300, 84, WHITE, TRANSPILER[1])
    drawn += text(470, 86, "single-node program", 14, weight=600)
    for x, words in ((334, "forward"), (426, "backward"), (518, "optimizer")):
        drawn += pill(x, 104, 88, words, TRANSPILER[1])
    drawn += arrow("M 620 104 H 706", TRANSPILER[2]) + text(662, 96, "split", 12.5, TRANSPILER[2])
    drawn += box(710, 50, 210, 48, WHITE, TRAINER[1]) + box(710, 110, 210, 48, WHITE, PSERVER[1])
    drawn += text(815, 71, "trainer program", 14, TRAINER[2], 600)
    drawn += text(815, 89, "sends and receives instead", 12, GREY)
    drawn += text(815, 131, "one program a server", 14, PSERVER[2], 600)
    return drawn + text(815, 149, "receives, merges, updates", 12, GREY)


def trainers() -> str:
    """The left band: what each trainer does in a step."""
    drawn = band(20, 224, 340, 316, TRAINER, "trainer", "a replica of the model, on CPU or GPU")
    for number, y in enumerate((266, 378)):
        drawn += box(40, y, 300, 96, WHITE, TRAINER[1])
        drawn += text(56, y + 25, f"trainer {number}", 14, weight=600, anchor="start")
        drawn += text(324, y + 25, "its part of the data", 12.5, GREY, anchor="end")
        for x, words, width in ((56, "forward", 76), (136, "backward", 80), (220, "send", 50)):
            drawn += pill(x, y + 50, width, words, TRAINER[1])
        drawn += pill(274, y + 50, 50, "recv", TRAINER[1])
    drawn += text(190, 502, "or no servers at all: trainers average", 12.5, GREY)
    return drawn + text(190, 520, "their gradients by NCCL or gloo", 12.5, GREY)


def servers() -> str:
    """The right band: what each server holds and does."""
    drawn = band(600, 224, 340, 316, PSERVER, "pserver", "slices and rows, no user code")
    for number, y in enumerate((266, 378)):
        drawn += box(620, y, 300, 96, WHITE, PSERVER[1])
        drawn += text(636, y + 25, f"server {number}", 14, weight=600, anchor="start")
        drawn += text(904, y + 25, "merge, then the optimizer", 12.5, GREY, anchor="end")
        drawn += pill(636, y + 50, 134, "parameter slices", PSERVER[1])
        drawn += pill(776, y + 50, 128, "embedding rows", PSERVER[1])
    drawn += text(770, 502, "every step of a trainer is applied once,", 12.5, GREY)
    return drawn + text(770, 520, "however often it is sent", 12.5, GREY)


def exchange() -> str:
    """Between trainers and servers: what travels, how, and when."""
    drawn = ""
    for y in (302, 414):
        drawn += arrow(f"M 362 {y} H 596", TRAINER[2]) + arrow(f"M 598 {y + 28} H 364", PSERVER[2])
    drawn += text(480, 293, "gradients, ids of rows", 12.5, TRAINER[2])
    drawn += text(480, 348, "parameters, rows", 12.5, PSERVER[2])
    drawn += text(480, 376, "shared memory, TCP, gRPC", 12, GREY)
    drawn += text(480, 405, "at every step,", 12.5, TRAINER[2])
    drawn += text(480, 460, "or every k steps", 12.5, PSERVER[2])
    drawn += text(480, 502, "sync, async, half-async,", 12.5, GREY)
    drawn += text(480, 520, "bounded staleness, geo, DiLoCo", 12.5, GREY)
    down = "M 780 174 V 196 H 190 V 218"
    drawn += arrow(down, TRAINER[2]) + arrow("M 850 174 V 218", PSERVER[2])
    return drawn + text(480, 213, "every process checks the same plan by its fingerprint", 12, GREY)


def picture() -> str:
    """The whole picture as SVG."""
    heads = "".join(head(accent) for _, _, accent in (TRANSPILER, TRAINER, PSERVER))
    title = "A training script is captured, split, and run by trainers and parameter servers"
    parts = (transpiler(), trainers(), servers(), exchange())
    body = "".join(parts).replace("><", ">\n<")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n<title>{title}</title>\n'
        f"<defs>{heads}</defs>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{WHITE}"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(picture())
    else:
        PICTURE.write_text(picture(), encoding="utf-8")
