"""The pages of docs/ that are made from the sources, so that nothing is written twice; one source,
the fields of a strategy for type checkers; and README.md for a package index.

``make reference`` writes them all, and a test says which are not current.  A generator is a module
whose ``pages()`` gives the text of each of its pages, by the path from docs/.
"""

from __future__ import annotations

from pathlib import Path

from docs.generators import (
    api,
    benchmarks,
    command_line,
    description,
    environment,
    errors,
    index_of_names,
    metrics,
    notes,
    planner,
    ports,
    strategy_fields,
    strategy_keys,
    wire,
)

DOCS = Path(__file__).parent.parent
GENERATORS = (
    *(api, benchmarks, command_line, description, environment, errors, index_of_names, metrics),
    *(notes, planner, ports, strategy_fields, strategy_keys, wire),
)


def every_page() -> dict[str, str]:
    """The text of each generated page, by its path from docs/."""
    return {path: text for each in GENERATORS for path, text in each.pages().items()}
