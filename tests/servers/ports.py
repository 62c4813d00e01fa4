"""Free ports."""

import random
import socket

# Below the range from which systems take the ports of outgoing connections: a server that is down for a while would
# otherwise lose its port to some client.
_RANGE = range(15_000, 22_000)
_given: set[int] = set()


def free_port(*offsets: int) -> int:
    """A port of the loopback interface that nobody listens on and that was not given out before.

    Args:
        offsets: distances at which the ports must be free as well (a Redis Cluster node needs 10000).
    """
    for port in random.sample(_RANGE, len(_RANGE)):
        if port not in _given and all(_is_free(port + offset) for offset in (0, *offsets)):
            _given.add(port)
            return port
    message = "no free port"
    raise OSError(message)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
