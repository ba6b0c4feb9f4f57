"""Hook of mkdocs: links that leave docs/ (to source, tests, the root's pages) become their path as code.

In the repository such links lead to the file; the site has no such file, and where the repository is hosted
is not written down anywhere.
"""

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's text with links out of docs/ replaced."""
    depth = page.file.src_uri.count("/")

    def replaced(link: re.Match[str]) -> str:
        words, target = link[1], link[2]
        if target.count("../") <= depth:
            return link[0]  # within docs/
        path = target.rsplit("../", 1)[1]
        return words if path in words.strip("`") else f"{words} (`{path}`)"

    return _LINK.sub(replaced, markdown)
