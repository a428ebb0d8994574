"""A page as a browser reads it."""

import re
from html.parser import HTMLParser


class BrowserPage(HTMLParser):
    """A page: its tags and attributes, the lines of its text, and its rows of cells, those of the legend first."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.lines, self.rows = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "svg":
            self.rows.append([])
        elif tag == "rect" and found["class"] == "stored":
            self.rows[-1] = [("stored", 1.0)] * int(found["width"])
        elif tag == "rect":
            cells = slice(int(found["x"]), int(found["x"]) + int(found["width"]))
            self.rows[-1][cells] = [(found["class"], float(found["fill-opacity"]))] * int(found["width"])

    def handle_data(self, data):
        if "body" in self.tags and data.strip():
            self.lines.append(data.strip())

    @property
    def drawn(self):
        """What each cell means, in each row of a process."""
        return [[meaning for meaning, _ in row] for row in self.process_rows]

    @property
    def process_rows(self):
        """The cells of each row of a process."""
        processes = sum(bool(re.fullmatch(r"process +\d+", line)) for line in self.lines)
        return self.rows[len(self.rows) - processes :]
