"""An HTTP endpoint that deduplicates by `Idempotency-Key`, as payment providers do."""

import contextlib
import http.server
import json
import random
import threading


@contextlib.contextmanager
def deduplicating_endpoint(failures=0.0):
    """Serve one; gives it with its `url`, its `effects` in order, and how many `duplicates` it has swallowed."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.failures = failures
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    failures = 0.0

    def __init__(self, *args):
        super().__init__(*args)
        self.effects = []
        self.duplicates = 0
        self._keys = set()
        self._lock = threading.Lock()
        self._chance = random.Random(1)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"

    def accept(self, key, payload):
        """The effect, once for each key; False if the endpoint is down just now."""
        with self._lock:
            if self._chance.random() < self.failures:
                return False
            if key in self._keys:
                self.duplicates += 1
            else:
                self._keys.add(key)
                self.effects.append(payload)
            return True

    def handle_error(self, *_):
        """A relay was killed in the middle of its request."""


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        accepted = self.server.accept(self.headers["Idempotency-Key"], payload)
        self.send_response(200 if accepted else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""
