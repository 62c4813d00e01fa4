"""Real servers and processes that a test can start, kill, freeze and cut off.

Everything here runs in a private folder on a port of its own and cannot outlive the process that started it. Each class
is a context manager and knows by `available()` whether this machine can run it. Nothing here knows the package under test.
"""

from servers.mariadb import MariaDB
from servers.pgbouncer import PgBouncer
from servers.postgresql import PostgreSQL
from servers.process import Node
from servers.proxy import Proxy
from servers.redis import Redis, RedisCluster, RedisSentinel

__all__ = ["MariaDB", "Node", "PgBouncer", "PostgreSQL", "Proxy", "Redis", "RedisCluster", "RedisSentinel"]
