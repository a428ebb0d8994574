"""Pages of HTML, read as a browser does, and a name that would break out of them."""

import re
from html.parser import HTMLParser

HOSTILE = "<script>alert(1)<|script>&\"'[red]{0}\x1b[31m"
CLEAN = HOSTILE.replace("\x1b", "\\x1b")


class Page(HTMLParser):
    """Has the tags and attributes of a page, its text, and each character of that with its colour."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self._colours, self._classes = [], [], "", [], [None]
        self._colour_of = dict(re.findall(r"\.(r\d+) \{background-color: (#\w+)", html))
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._classes.append(dict(attrs).get("class"))

    def handle_endtag(self, tag):
        self._classes.pop()

    def handle_data(self, data):
        if "pre" in self.tags:
            self.text += data
            self._colours += [self._colour_of.get(self._classes[-1])] * len(data)

    def cells(self):
        """The colours of the cells of each row, as red, green and blue."""
        rows = [
            [self._colours[at] for at in range(*row.span(1))]
            for row in re.finditer(r"^ process +\d+ ( +)$", self.text, re.MULTILINE)
        ]
        return [[tuple(bytes.fromhex(colour[1:])) for colour in row] for row in rows]


def kind(colour):
    """What a cell's colour says: nothing is read, only what is needed, or more."""
    red, _, blue = colour
    return "nothing" if colour == (233, 235, 238) else "read" if blue > red else "over-read"
