"""A program as a picture: SVG written by hand, for any browser and any documentation.

Every block is a panel, every op a box in the order in which it runs, coloured by the phase of the
step.  Communication is drawn as in a sequence diagram: each server of a trainer's program is a
vertical line; an arrow runs from a send to the servers that receive, and from servers to a recv.
To the left of the ops, arcs join a communication op with the op that computed its input.  In a
server's program a line runs from ``listen_and_serv`` to each block that it runs.  Rings of trainers
are vertical lines, too, to the right of the servers where a job has both: an arrow runs to a ring
where a sum or broadcast starts, and back where the trainer waits for it.

The tooltip of a box shows the whole op, with types and the line of the user's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from transpiler.files.named_errors import naming
from transpiler.formats.text import (
    BOX,
    CHARACTER,
    EXCHANGE,
    GAP,
    GUTTER,
    LANE,
    MARGIN,
    MERGE,
    PADDING,
    PANEL,
    UPDATE,
    BlockPanel,
    call,
    header,
    kind_of,
    panels_of,
    phases,
    quoted,
    results,
    shortened,
    types,
)
from transpiler.ir.graph import Block, Op, Ref
from transpiler.ir.ops import is_optimizer
from transpiler.plan.plan import Deployment

# phase -> (fill, edge, words)
COLOURS = {
    "forward": ("#e8f1fb", "#4a86c5", "forward"),
    "backward": ("#efe9fa", "#8062c0", "backward"),
    EXCHANGE: ("#fff0dc", "#e08a1e", "exchange"),
    MERGE: ("#e0f4f2", "#2b9a8f", "merge, clip"),
    UPDATE: ("#e6f5e3", "#4b9c3f", "update"),
}
SEND, RECV = "#e08a1e", "#4a86c5"
_RING = "ring "
_WIRE = frozenset(
    {
        "send",
        "recv",
        "send_barrier",
        "fetch_barrier",
        "c_broadcast",
        "c_allreduce_avg",
        "c_allreduce_sum",
        "c_reduce_sum",
        "c_sync_comm_stream",
    }
    | {"prefetch", "distributed_lookup_table"}  # which send a request and receive an answer
)
STYLE = """
  text { font: 11px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
fill: #24292f; }
  .head { font-size: 15px; font-weight: bold; } .title { font-weight: bold; font-size: 12px; } \
.quiet { fill: #6a737d; }
  .panel { fill: #fbfcfd; stroke: #d0d7de; } .line { fill: none; stroke-width: 1.3; } \
.life { stroke: #8c959f; stroke-width: 2; }
  .wait { stroke-dasharray: 3 3; }
"""


# ---- one panel ----


def _title(block: Block) -> str:
    updated = [op.outputs[0] for op in block.ops if is_optimizer(op.type) and op.outputs][:1]
    updated += [
        f"lookups of {op.inputs[0]}" for op in block.ops if op.type == "lookup_table" and op.inputs
    ]
    return f"block {block.index}" + (
        f": {', '.join(updated[:3])}" if updated and block.index else ""
    )


def _label(op: Op) -> str:
    """The text of an op's box; without endpoints, which the arrows show."""
    if op.type in _WIRE and "endpoints" in op.arguments:
        return f"{op.type}({', '.join([*op.inputs, *op.outputs])})"
    return f"{results(op)} {call(op)}".strip()


def _box(panel: BlockPanel, number: int, op: Op, phase: str, main: Block) -> Iterator[str]:
    fill, edge, _ = COLOURS[phase]
    y, width = panel.middle(number) - BOX / 2, panel.right - panel.left
    label, kind = _label(op), types(op, panel.block, main)
    room = width - 18
    beside = kind if (len(label) + len(kind) + 2) * CHARACTER <= room else ""
    whole = "\n".join(
        part for part in (f"{results(op)} {call(op)}".strip(), kind, op.location) if part
    )
    yield f"<g><title>{quoted(whole)}</title>"
    edges = f'fill="{fill}" stroke="{edge}" stroke-opacity=".45"'
    yield f'<rect x="{panel.left:g}" y="{y:g}" width="{width:g}" height="{BOX}" rx="4" {edges}/>'
    yield f'<rect x="{panel.left:g}" y="{y:g}" width="4" height="{BOX}" rx="2" fill="{edge}"/>'
    yield f'<text x="{panel.left + 11:g}" y="{y + 14.5:g}">{quoted(shortened(label, room))}</text>'
    if beside:
        yield (
            f'<text x="{panel.right - 7:g}" y="{y + 14.5:g}" text-anchor="end" '
            f'class="quiet">{quoted(beside)}</text>'
        )
    yield "</g>"


def _panel(panel: BlockPanel, main: Block) -> Iterator[str]:
    yield (
        f'<rect x="{panel.x:g}" y="{panel.y:g}" width="{PANEL}" height="{panel.height:g}" '
        'rx="8" class="panel"/>'
    )
    title = shortened(_title(panel.block), PANEL - 2 * PADDING - 20)
    yield (
        f'<text x="{panel.x + PADDING:g}" y="{panel.y + 20:g}" class="title">{quoted(title)}</text>'
    )
    for number, (op, phase) in enumerate(zip(panel.block.ops, phases(panel.block), strict=True)):
        yield from _box(panel, number, op, phase, main)


# ---- lines ----


def _arcs(panel: BlockPanel) -> Iterator[str]:
    """Arcs in the left gutter from the op that computes a variable to the one that sends it."""
    writer: dict[str, int] = {}
    for number, op in enumerate(panel.block.ops):
        if op.type in (
            "split",
            "send",
            "concat",
            "split_ids",
            "prefetch",
            "merge_ids",
            "c_allreduce_avg",
            "c_allreduce_sum",
            "c_reduce_sum",
        ):
            for source in sorted({writer[name] for name in op.inputs if name in writer}):
                start, end, x = panel.middle(source), panel.middle(number), panel.left
                depth = min(10 + (number - source) * 2.2, GUTTER - 4)
                curve = (
                    f"M{x:g} {start:g}C{x - depth:g} {start:g} {x - depth:g} {end:g} "
                    f"{x - 2:g} {end:g}"
                )
                yield (
                    f'<path d="{curve}" class="line" stroke="{_colour(op)}" '
                    f'marker-end="url(#{_end(op)})"/>'
                )
        writer.update(dict.fromkeys(filter(None, op.outputs), number))


_ARRIVES = frozenset(
    {
        "recv",
        "concat",
        "fetch_barrier",
        "c_sync_comm_stream",
        "prefetch",
        "merge_ids",
        "distributed_lookup_table",
    }
)


def _end(op: Op) -> str:
    return "blue" if op.type in _ARRIVES else "orange"


def _colour(op: Op) -> str:
    return RECV if _end(op) == "blue" else SEND


def _endpoints(op: Op) -> list[str]:
    if "ring_id" in op.arguments:
        return [_ring(op.arguments["ring_id"])]
    value = op.arguments.get("endpoints", ())
    items = value if isinstance(value, tuple) else (value,)
    return list(dict.fromkeys(item.name if isinstance(item, Ref) else str(item) for item in items))


def _peers(main: Block, deployment: Deployment | None) -> list[str]:
    """The names of the vertical lines: a trainer's servers, then its rings."""
    if deployment is not None and deployment.plan.collective is not None:
        rings = deployment.plan.collective.rings
        wired = any(op.type in _WIRE for op in main.ops)
        return [_ring(number) for number in range(rings)] if wired else []
    servers = [
        endpoint
        for op in main.ops
        if op.type in ("send", "recv", "prefetch")
        for endpoint in _endpoints(op)
    ]
    planned = deployment.endpoints if deployment and deployment.trainer_id is not None else ()
    rings_used = {_ring(op.arguments["ring_id"]) for op in main.ops if "ring_id" in op.arguments}
    return list(dict.fromkeys([*planned, *servers, *sorted(rings_used)]))


def _ring(number: object) -> str:
    return f"{_RING}{number}"


def _lifelines(panel: BlockPanel, peers: list[str]) -> tuple[dict[str, float], float]:
    """The x coordinate of each vertical line, and of the end of the last one's label."""
    step = max(16.0, min(170.0, 1000 / max(len(peers), 1)))
    first = panel.x + PANEL + 90
    return {name: first + index * step for index, name in enumerate(peers)}, first + len(
        peers
    ) * step


def _sequence(panel: BlockPanel, peers: list[str], trainers: int) -> Iterator[str]:
    """The vertical lines, and the arrows to and from them.

    Args:
        trainers: of each ring.
    """
    places, _ = _lifelines(panel, peers)
    bottom = panel.y + panel.height
    few = len(peers) <= 7
    for index, (name, x) in enumerate(places.items()):
        title = f"<title>{quoted(name)}</title>"
        yield (
            f'<line x1="{x:g}" y1="{panel.y + 26:g}" x2="{x:g}" y2="{bottom:g}" '
            f'class="life">{title}</line>'
        )
        if few:
            above = f"{trainers} trainers" if name.startswith(_RING) else f"server {index}"
            yield (
                f'<text x="{x:g}" y="{panel.y + 4:g}" text-anchor="middle" '
                f'class="quiet">{above}</text>'
            )
        brief = name.replace(_RING, "r") if name.startswith(_RING) else str(index)
        label = shortened(name, 166) if few else brief
        yield (
            f'<text x="{x:g}" y="{panel.y + 19:g}" text-anchor="middle" '
            f'class="title">{quoted(label)}</text>'
        )
    for number, op in enumerate(panel.block.ops):
        targets = (
            [places[name] for name in _endpoints(op) if name in places] if op.type in _WIRE else []
        )
        for order, x in enumerate(sorted(targets, reverse=True)):
            y = panel.middle(number) + (order - (len(targets) - 1) / 2) * min(5, BOX / len(targets))
            yield _arrow(op, panel.right, x, y)


def _arrow(op: Op, box: float, server: float, y: float) -> str:
    start, end = (
        (server - 1, box + 2) if op.type in _ARRIVES - {"fetch_barrier"} else (box, server - 2)
    )
    waits = " wait" if op.type.endswith("barrier") else ""
    return (
        f'<path d="M{start:g} {y:g}H{end:g}" class="line{waits}" stroke="{_colour(op)}" '
        f'marker-end="url(#{_end(op)})"/>'
    )


def _branches(panels: list[BlockPanel]) -> Iterator[str]:
    """Lines from listen_and_serv to the blocks that it runs."""
    main = panels[0]
    for number, op in enumerate(main.block.ops):
        lists = [op.arguments.get(key, ()) for key in ("optimize_blocks", "prefetch_blocks")]
        named = {index for each in lists if isinstance(each, tuple) for index in each}
        for panel in panels[1:]:
            if panel.block.index in named:
                x, y, to = main.right, main.middle(number), panel.y + 16
                middle = main.x + PANEL + GAP
                curve = (
                    f"M{x:g} {y:g}C{middle:g} {y:g} {middle:g} {to:g} {middle + GAP / 2:g} "
                    f"{to:g}H{panel.x - 3:g}"
                )
                yield (
                    f'<path d="{curve}" class="line" stroke="{SEND}" stroke-opacity=".6" '
                    'marker-end="url(#orange)"/>'
                )


# ---- the whole ----


def _legend(blocks: Sequence[Block], y: float) -> Iterator[str]:
    present = {phase for block in blocks for phase in phases(block)}
    x = float(MARGIN)
    for phase, (fill, edge, words) in COLOURS.items():
        if phase in present:
            yield (
                f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" rx="3" fill="{fill}" '
                f'stroke="{edge}"/>'
            )
            yield f'<text x="{x + 18:g}" y="{y:g}">{words}</text>'
            x += 18 + len(words) * CHARACTER + 22


def _markers() -> Iterator[str]:
    yield "<defs>"
    for name, colour in (("orange", SEND), ("blue", RECV)):
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">'
        )
        yield f'<path d="M0 0.5L8 4L0 7.5z" fill="{colour}"/></marker>'
    yield "</defs>"


def svg(blocks: Sequence[Block], deployment: Deployment | None) -> str:
    """The picture of a program, as the text of an SVG file."""
    first, *lanes = header(deployment, kind_of(blocks[0])).splitlines()
    top = MARGIN + LANE * len(lanes)
    panels = panels_of(blocks, top + 66)
    peers = _peers(blocks[0], deployment)
    trainers = 1 if deployment is None else deployment.plan.trainers
    width = max(panel.x + PANEL for panel in panels) + MARGIN
    if peers:
        width = max(width, _lifelines(panels[0], peers)[1])
    height = max(panel.y + panel.height for panel in panels) + MARGIN
    # its letters are larger
    head = shortened(first, (width - 2 * MARGIN) * 0.72)
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">',
        f"<style>{STYLE}</style>",
        *_markers(),
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 14}" class="head">{quoted(head)}</text>',
        *(
            f'<text x="{MARGIN}" y="{MARGIN + 14 + LANE * number}" class="quiet">'
            f"{quoted(shortened(lane.strip(), width - 2 * MARGIN))}</text>"
            for number, lane in enumerate(lanes, start=1)
        ),
        *_legend(blocks, top + 40),
        *(_branches(panels) if len(panels) > 1 else ()),
        *(part for panel in panels for part in _panel(panel, blocks[0])),
        *_arcs(panels[0]),
        *(_sequence(panels[0], peers, trainers) if peers else ()),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def draw(blocks: Sequence[Block], deployment: Deployment | None, path: Path) -> None:
    """Writes the picture to a file.

    Raises:
        OSError: the file cannot be written.
    """
    with naming(path):
        path.write_text(svg(blocks, deployment), encoding="utf-8")
