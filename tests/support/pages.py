"""Pages of HTML, read as a browser does, and a name that would break out of them."""

from html.parser import HTMLParser

HOSTILE = "</script><script>alert(1)</script>&\"'{{data}}\x1b[31m"


class Page(HTMLParser):
    """Counts tags and keeps all attributes, and what the script gets as data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self._is_data, self.data = [], [], False, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._is_data = ("id", "data") in attrs

    def handle_data(self, data):
        if self._is_data:
            self.data += data
