"""The socket between the two processes: messages arrive whole and in order, and the engine never waits for a reader."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.server.process.channel import Channel, Inbox, framed

LARGE = bytes(range(256)) * 256


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    own, its = socket.socketpair()
    with own, its:
        yield own, its


@pytest.mark.parametrize("size", [1, 3, 5, 1 << 20])
def test_messages_arrive_whole_however_their_bytes_are_cut(size: int) -> None:
    messages = [b"one", b"", LARGE[:1000], b"four"]
    found: list[bytes] = []
    inbox, data = Inbox(found.append), b"".join(map(framed, messages))
    for begin in range(0, len(data), size):
        inbox.data_received(data[begin : begin + size])
    assert found == messages


def test_a_sender_does_not_wait_for_a_slow_reader_and_nothing_is_lost(ends: tuple[socket.socket, ...]) -> None:
    channel, reader = Channel(ends[0]), Channel(ends[1])
    sent = [bytes([at]) * 10_000 for at in range(100)]  # far more than a socket holds
    thread = threading.Thread(target=lambda: [channel.send(each, wait=False) for each in sent], daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "waits for the reader"
    last = threading.Thread(target=channel.send, args=(b"last",), kwargs={"wait": True}, daemon=True)
    last.start()
    assert [reader.receive() for _ in range(101)] == [*sent, b"last"]
    last.join(60)


def test_either_end_finds_the_other_gone(ends: tuple[socket.socket, ...]) -> None:
    own, its = ends
    channel = Channel(its)
    own.sendall(framed(b"whole") + framed(b"cut short")[:-1])
    own.close()
    assert channel.receive() == b"whole"
    assert channel.receive() is None
    channel.send(LARGE, wait=True)
    channel.send(LARGE, wait=False)
