"""Write the files; see the package."""

from __future__ import annotations

from pathlib import Path

from infra.observability.generator.files import files

for path, text in files().items():
    file = Path(__file__).parents[1] / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, "utf-8")
