"""Has the site show docstrings' references and code blocks, which are written for a terminal, as Markdown.

mkdocs.yml names this file as an extension of griffe.
"""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
BLOCK = re.compile(r"[ ]*::$", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites each docstring when its object has been read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """``:class:`dgc.Config``` becomes `dgc.Config`; the two colons before a block of code go."""
        if obj.docstring is not None:
            obj.docstring.value = BLOCK.sub("", ROLE.sub(r"`\1`", obj.docstring.value))
