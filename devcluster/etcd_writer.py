"""Raises the versions of etcd's data: `python -m devcluster.etcd_writer COUNT` writes that often through its gateway.

As `etcdutl snapshot restore --bump-revision` does, so that versions are ahead of those that clients have seen.
"""

import http.client
import json
import sys
import time
from base64 import b64encode

ADDRESS = ("127.0.0.1", 2379)
START_SECONDS = 30.0


def write(count: int) -> None:
    """Write one key `count` times, once etcd answers. Raises OSError if it never does."""
    body = json.dumps({"key": b64encode(b"/raised").decode(), "value": ""})
    connection = _connection()
    for _ in range(count):
        connection.request("POST", "/v3/kv/put", body)
        response = connection.getresponse()
        response.read()
        if response.status != http.HTTPStatus.OK:
            raise OSError(f"etcd answers {response.status}")


def _connection() -> http.client.HTTPConnection:
    deadline = time.monotonic() + START_SECONDS
    while True:
        connection = http.client.HTTPConnection(*ADDRESS, timeout=START_SECONDS)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().read():
                return connection
        except OSError:
            if time.monotonic() > deadline:
                raise
        connection.close()
        time.sleep(0.2)


if __name__ == "__main__":
    write(int(sys.argv[1]))
