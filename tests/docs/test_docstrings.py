"""Our docstrings as Markdown, for the pages of the Python interface."""

from __future__ import annotations

from docs.site.docstrings import as_markdown

WRITTEN = """Runs a step, as :func:`trainer.fleet.init` says.

Example::

    if ready:
        step(2)

The parts::

    a -> b

Example:
    >>> 1 + 1
    2"""
READ = """Runs a step, as `trainer.fleet.init` says.

Examples:
    ```python
    if ready:
        step(2)
    ```

The parts:

```text
a -> b
```

Examples:
    >>> 1 + 1
    2"""


def test_literal_blocks_become_fences() -> None:
    """Python code and drawings are told apart; roles are code; sections have known names."""
    assert as_markdown(WRITTEN) == READ
