"""The bucket of the tests itself: what real stores promise, and tests rely on."""

import socket
from urllib.parse import urlsplit

from .s3_server import s3_server


def test_an_object_that_was_cut_on_its_way_is_not_stored() -> None:
    with s3_server() as server:
        with socket.create_connection(("127.0.0.1", urlsplit(server.endpoint).port)) as client:
            client.sendall(b"PUT /bucket/one HTTP/1.1\r\nHost: s3\r\nContent-Length: 10\r\n\r\nhalf.")
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b"", "the connection is closed without an answer"
        assert not server.objects
