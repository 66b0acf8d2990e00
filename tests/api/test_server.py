"""How a pod ends, whatever its clients do."""

from __future__ import annotations

import json
import socket

from tests.api.conftest import Deploy
from tests.api.deployment import PATHS
from tests.support import eventually


async def test_a_pod_ends_while_a_client_takes_nothing_of_a_response_that_is_written(deploy: Deploy) -> None:
    """The event loop would wait for such a connection for ever."""
    up = await deploy({"script": ["x" * 30_000] * 300})
    body = json.dumps(up.body("completions")).encode()
    head = f"POST {PATHS['completions']} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(up.pods[0].url.rpartition(":")[2])))
        client.sendall(head.encode() + body)
        await eventually(lambda: up.recorded.told)
        await eventually(lambda: not up.pods[0].server_state.tasks)
        [connection] = up.pods[0].server_state.connections
        assert connection.transport.get_write_buffer_size() > 1_000_000
        await up.pods[0].stop()
        await eventually(lambda: not up.pods[0].server_state.connections)
