"""`python -m shardferry.cli` is `shardferry`."""

from __future__ import annotations

from shardferry.cli.main import main

main()
