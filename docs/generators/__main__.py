"""Writes the pages of docs/ that are made from the sources: ``python -m docs.generators``."""

from docs.generators import DOCS, every_page

for path, text in every_page().items():
    (DOCS / path).parent.mkdir(exist_ok=True)
    (DOCS / path).write_text(text, encoding="utf-8")
    print(f"wrote docs/{path}")
