"""Another server's answers, as an app: whatever speaks HTTP can so fail as told, and be watched.

Requests pass as they came, with the `Host` that they were signed for.
"""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from tests.support.servers.server import App, Request, Response

# What a connection says of itself, or this server by itself.
_NOT_ASKED = {"connection", "transfer-encoding", "content-length", "expect"}
_NOT_ANSWERED = {"connection", "keep-alive", "transfer-encoding", "content-length", "date"}


def forward(url: str) -> App:
    """The app of the server at `url`."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    assert host is not None

    def answered(request: Request) -> Response:
        connection = http.client.HTTPConnection(host, port)
        try:
            signed = "Host" in request.headers
            connection.putrequest(request.method, request.target, skip_host=signed, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in _NOT_ASKED:
                    connection.putheader(name, value)
            if request.body or request.method in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _NOT_ANSWERED}
        if request.method == "HEAD" and "Content-Length" in answer.headers:
            headers["Content-Length"] = answer.headers["Content-Length"]
        return Response(answer.status, headers, body)

    return answered
