"""The flags by which torch updates many elements, or many parameters, with one kernel."""

from __future__ import annotations

from transpiler.ir.rules import RULES


def fusion_of(kind: str) -> str:
    """The flag by which torch updates many elements, or many parameters, with one kernel: "fused",
    or where a rule has no such kernel "foreach".

    Args:
        kind: the type of an optimizer op.

    Raises:
        ValueError: the rule has neither.
    """
    flags = RULES[kind].flags if kind in RULES else ()
    found = next((flag for flag in ("fused", "foreach") if flag in flags), None)
    if found is None:
        having = ", ".join(name for name, spec in RULES.items() if {*spec.flags} & {"foreach"})
        raise ValueError(
            f"fuse_all_optimizer_ops: torch has no fused update for {kind!r}; it has some for "
            f"{having}"
        )
    return found
