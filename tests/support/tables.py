"""Results of a matrix as a markdown table."""

from __future__ import annotations

from collections.abc import Sequence

Result = tuple[dict[str, str], str]  # axis -> value, and the outcome: "passed", ..., "" (not run)


def table(results: Sequence[Result]) -> str:
    """Rows are the first axis, columns the second, where there is one; a cell counts how many of
    its combinations of the other axes have passed.
    """
    first, *others = list(results[0][0])
    second, *rest = others or [""]
    rows = list(dict.fromkeys(axes[first] for axes, _ in results))
    columns = list(dict.fromkeys(axes.get(second, "") for axes, _ in results))
    lines = [
        [f"{first} \\ {second}" if second else first, *(name or "outcome" for name in columns)]
    ]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        cells = [
            _cell(
                [o for axes, o in results if (axes[first], axes.get(second, "")) == (row, column)]
            )
            for column in columns
        ]
        lines.append([row, *cells])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    for axis in rest:
        values = dict.fromkeys(axes[axis] for axes, _ in results)
        text += f"\nEach over {axis}: {', '.join(values)}.\n"
    return text


def _cell(outcomes: Sequence[str]) -> str:
    passed, failed = outcomes.count("passed"), outcomes.count("failed")
    if not any(outcomes):
        return "not run yet" if outcomes else ""
    if set(outcomes) == {"skipped"}:
        return "skipped"
    said = "ok" if passed == len(outcomes) == 1 else f"{passed} of {len(outcomes)}"
    return f"**FAILED**: {said}" if failed else said


def details(results: Sequence[Result]) -> str:
    """The result of each combination: rows are all axes but the second, which has the columns,
    where there is one.
    """
    _, second, *_ = [*results[0][0], ""]
    columns = list(dict.fromkeys(axes.get(second, "") for axes, _ in results))
    rows: dict[str, dict[str, str]] = {}
    for axes, result in results:
        row = ", ".join(value for axis, value in axes.items() if axis != second)
        rows.setdefault(row, {})[axes.get(second, "")] = result
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(cells.get(name, "") for name in columns)] for row, cells in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
