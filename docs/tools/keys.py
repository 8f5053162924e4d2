"""Write the tables of keys into docs/configuration.md: `python docs/tools/keys.py`.

Each table is between ``<!-- NAME: ... -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

from pathlib import Path

from adaptive_batch.torchtune import reference_tables

PAGE = Path(__file__).resolve().parents[1] / "configuration.md"


def main() -> None:
    """Rewrite the tables of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in reference_tables().items():
        begin = text.index("-->", text.index(f"<!-- {name}: ")) + len("-->")
        text = f"{text[:begin]}\n\n{rows}\n\n{text[text.index('<!-- end -->', begin) :]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
