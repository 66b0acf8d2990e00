"""A hint on the wire: msgpack [[job, id, entry]...], what pods are told of entries that a log has acknowledged.

`lua/lib.lua` builds the same bytes for the one entry that a script appends.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.broker.protocol import Append

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Append])


def encode_hint(entries: Sequence[Append]) -> bytes:
    return _encoder.encode(entries)


def decode_hint(message: bytes) -> list[Append]:
    return _decoder.decode(message)
