"""Links that lead out of docs/ have no page on the site: there they stand as the path in the repository.

In: the Markdown of a page. Out: the same, each such link as its text and path.
"""

import posixpath
import re

from mkdocs.structure.pages import Page

_LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, **_options: object) -> str:
    """Rewrite the links of one page."""
    folder = posixpath.dirname(page.file.src_uri)

    def told(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[2]))
        if path.startswith("docs/"):
            return match[0]
        text = match[1].strip("`")
        return f"`{path}`" if text.strip("/") in path else f"{match[1]} (`{path}`)"

    return _LINK.sub(told, markdown)
