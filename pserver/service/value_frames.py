"""The values of one stream's answers as frames: they travel, or their names do, where the trainer
reads them in the server's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pserver.transport import frames as codec
from pserver.transport.memory import IN_ORDER, Segment
from pserver.transport.stream import Stream
from pserver.wire_pb2 import Kind

# of the values that one frame names: the server goes on while the trainer reads them
NAMED_BYTES = 2**22


class ValueFrames:
    """Makes VALUE frames for one stream.  One thread uses it.

    See [Note: values that change] in pserver/transport/zones.py.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._shared: Segment | None = None  # in which the trainer reads

    def share(self, segment: Segment | None) -> bool:
        """Whether the trainer reads the values of a segment where they are; it is told of the
        segment the first time.

        Raises:
            Unreachable: the peer is gone.
        """
        if segment is None or self._stream.offer is None:
            return False
        if self._shared is None:
            self._stream.offer(Kind.VALUE, segment)
            self._shared = segment
        return self._shared is segment

    def __contains__(self, name: str) -> bool:
        """Whether a value may change while the trainer reads it."""
        return IN_ORDER and self._shared is not None and name in self._shared.zones

    def apart(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The same value outside of what is shared."""
        return tensor.clone() if self._lies(name, tensor) else tensor

    def _lies(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether it is the shared memory itself."""
        if self._shared is None or name not in self._shared.zones:
            return False
        return self._shared.address(name) == tensor.data_ptr()

    def frames(
        self, step: int, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[codec.Packed]:
        """All frames of these values, each as soon as it is full."""
        named, whole = codec.Packer(2**62, NAMED_BYTES, NAMED_BYTES), codec.Packer()
        for name, tensor in tensors:
            packer = named if self._lies(name, tensor) else whole
            yield from packer.add(Kind.VALUE, step, [(name, tensor)])
        yield from named.flush()
        yield from whole.flush()
