"""Rewrites links that leave docs/, which mkdocs cannot follow, to the files in the repository."""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = f"{_PROJECT['urls']['Repository']}/blob/main"
_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?(\))")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page that leave docs/."""

    def rewrite(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), found[2]))
        if path.startswith("docs/"):
            return found[0]
        return f"{found[1]}{REPOSITORY}/{path}{found[3] or ''}{found[4]}"

    return _LINK.sub(rewrite, markdown)
