"""The published client: it reads a stream to its end over as many connections, and as many pods, as that takes.

It needs nothing of the server but its addresses, and imports no other room.
"""

from headrace.client.errors import ClientError, ConnectionLost, RequestRefused, StreamFailed
from headrace.client.stream import Chunk, Client

__all__ = ["Chunk", "Client", "ClientError", "ConnectionLost", "RequestRefused", "StreamFailed"]
