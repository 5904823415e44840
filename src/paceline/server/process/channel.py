"""The socket between the HTTP process and the engine's process: messages, each behind its length.

`Channel` is the engine's end: one thread receives and may wait, the engine's own sends and does not. `Inbox` is the
other end, called by the event loop as bytes arrive. Each end notices at once that the other is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

HEAD = 4  # bytes of a message's length


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(HEAD, "little") + message


class Channel:
    def __init__(self, own: socket.socket) -> None:
        self._socket, self._unsent = own, b""

    def receive(self) -> bytes | None:
        """Wait for the next message; None: the other end is closed."""
        head = self._exactly(HEAD)
        return None if head is None else self._exactly(int.from_bytes(head, "little"))

    def send(self, message: bytes, *, wait: bool) -> None:
        """Send a message. Without `wait`, bytes that the socket does not take are sent with the next message."""
        data = self._unsent + framed(message)
        try:
            if wait:
                self._socket.sendall(data)
            sent = len(data) if wait else self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:  # the other end is closed, which `receive` reports
            sent = len(data)
        self._unsent = data[sent:]

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            try:
                more = self._socket.recv(count - len(data), socket.MSG_WAITALL)
            except OSError:
                more = b""
            if not more:
                return None
            data += more
        return data


class Inbox(asyncio.Protocol):
    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._parts: list[bytes] = []  # of a message that is not complete
        self._size, self._needed = 0, HEAD  # bytes of these parts; those with which there is more to do

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        data, begin = b"".join(self._parts), 0
        while (body := begin + HEAD) <= len(data):
            end = body + int.from_bytes(data[begin:body], "little")
            if end > len(data):
                break
            self._take(data[body:end])
            begin = end
        rest = data[begin:]
        self._parts, self._size = [rest], len(rest)
        self._needed = HEAD + int.from_bytes(rest[:HEAD], "little") if len(rest) >= HEAD else HEAD
