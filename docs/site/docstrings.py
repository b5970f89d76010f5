"""Docstrings as the site shows them: the sources write Sphinx's roles and literal blocks, the site reads Markdown."""

import re

import griffe

ROLE = re.compile(r":(?:func|class|mod|meth|attr|data):`~?([^`]+)`")
LITERAL = re.compile(r"::(?=\n\n +\S)")


class Markdown(griffe.Extension):
    """Rewrites every docstring when its object is made."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """``:func:`x``` becomes `x`, and ``::`` before a literal block a colon."""
        if obj.docstring is not None:
            obj.docstring.value = LITERAL.sub(":", ROLE.sub(r"`\1`", obj.docstring.value))
