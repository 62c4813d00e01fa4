"""A TCP proxy whose network can be made slow, silent, closed or forgetful."""

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from servers.ports import free_port

if TYPE_CHECKING:
    from typing_extensions import Self

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER switched on with 0 seconds


@dataclass(eq=False)
class _Link:
    """A client's connection and the one made to the target for it."""

    client: socket.socket
    target: socket.socket
    over: threading.Event = field(default_factory=threading.Event)
    losing: "threading.Event | None" = None  # set when the reply that this link must lose has come
    pumps: list[threading.Thread] = field(default_factory=list)
    pumps_ended: int = 0

    def abort(self) -> None:
        """Makes the pumps end, the last of which then resets both connections."""
        self.over.set()
        for end in (self.client, self.target):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                # Closing a socket does not wake the thread that reads from it, this does, and it sends nothing.
                end.shutdown(socket.SHUT_RD)

    def join(self) -> None:
        """Waits until both connections are closed."""
        for pump in self.pumps:
            pump.join(1.0)
        if any(pump.is_alive() for pump in self.pumps):  # blocked in sending to somebody who does not read
            for end in (self.client, self.target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for pump in self.pumps:
            pump.join()


class Proxy:
    """Forwards `127.0.0.1:port` to a target port on the same machine; the switches may be set at any time.

    Args:
        target_port: where the real server listens.

    Attributes:
        port: where clients connect.
        delay: seconds that each piece waits before it is forwarded, either way: a round trip takes two of them.
        blackhole: connections are accepted and stay open, but nothing passes either way. As in a real network, what was
            sent meanwhile arrives when this is switched off, late.
        drop_replies: requests are forwarded, their replies swallowed.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = free_port()
        self.delay = 0.0
        self.blackhole = False
        self.drop_replies = False
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._armed: tuple[bytes, threading.Event] | None = None
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    def through(self, url: str) -> str:
        """The URL of the target, changed to lead through this proxy."""
        return url.replace(f":{self.target_port}", f":{self.port}")

    @property
    def refuse(self) -> bool:
        """Whether new connections are refused because nobody listens; connections that exist go on."""
        return self._listener is None

    @refuse.setter
    def refuse(self, refused: bool) -> None:
        if refused and self._listener:
            with contextlib.suppress(OSError):  # wakes the acceptor; some systems refuse it, and there `close` wakes
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._acceptor.join()
            self._listener = None
        elif not refused and not self._listener:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
            self._acceptor.start()

    def cut(self) -> None:
        """Resets all live connections, on both sides; new ones are accepted."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.abort()
        for link in links:
            link.join()

    def lose_next_reply(self, containing: bytes = b"") -> threading.Event:
        """Forwards the next request but, when its reply comes, swallows that and resets the connection.

        Args:
            containing: bytes by which to choose the request, such as `b"EVALSHA"`; the next of any kind if empty.

        Returns:
            An event that is set once a reply was lost: the server has done what it was asked.
        """
        lost = threading.Event()
        with self._lock:
            self._armed = (containing, lost)
        return lost

    def start(self) -> None:
        """Begins to listen."""
        self.refuse = False

    def stop(self) -> None:
        """Stops listening and resets all connections."""
        self.refuse = True
        self.cut()

    def __enter__(self) -> "Self":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # no longer listening
                return
            try:
                target = socket.create_connection(("127.0.0.1", self.target_port), timeout=5)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                client.close()
                continue
            target.settimeout(None)
            for end in (client, target):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._run(_Link(client, target))

    def _run(self, link: _Link) -> None:
        link.pumps = [threading.Thread(target=self._pump, args=(link, asks), daemon=True) for asks in (True, False)]
        with self._lock:
            self._links.add(link)
            for pump in link.pumps:  # within the lock: who cuts this link waits for its pumps
                pump.start()

    def _pump(self, link: _Link, asks: bool) -> None:
        source, sink = (link.client, link.target) if asks else (link.target, link.client)
        try:
            while piece := source.recv(65536):
                if not self._passes(link):
                    break
                if asks:
                    self._note_request(link, piece)
                elif link.losing:
                    link.losing.set()
                    link.abort()
                    break
                elif self.drop_replies:
                    continue
                sink.sendall(piece)
            # The news that a connection has ended is delayed and lost like everything else.
            if self._passes(link):
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            link.abort()
        finally:
            self._finish(link)

    def _passes(self, link: _Link) -> bool:
        if self.delay:
            link.over.wait(self.delay)
        while self.blackhole and not link.over.wait(0.005):
            pass
        return not link.over.is_set()

    def _note_request(self, link: _Link, piece: bytes) -> None:
        with self._lock:
            if self._armed and self._armed[0] in piece:
                link.losing, self._armed = self._armed[1], None

    def _finish(self, link: _Link) -> None:
        with self._lock:
            link.pumps_ended += 1
            last = link.pumps_ended == 2
            if last:
                self._links.discard(link)
        if last:
            link.client.close()
            link.target.close()
