"""A store that fails on command, around a real one."""

from apscheduler_fence.errors import StoreError


class TroubledStore:
    """Passes everything on, except what it is told to fail.

    `down` fails every call. `failing[verb]` is how many of the next calls of that verb fail before they reach the store;
    `losing[verb]` is how many are carried out with their answers lost.
    """

    def __init__(self, store):
        self.store = store
        self.namespace = store.namespace
        self.down = False
        self.failing = {}
        self.losing = {}
        self.calls = []
        self.closed = 0

    def _through(self, verb, *args):
        self.calls.append(verb)
        if self.down or self._counted(self.failing, verb):
            raise StoreError(f"{verb} fails on command")
        answer = getattr(self.store, verb)(*args)
        if self._counted(self.losing, verb):
            raise StoreError(f"the answer to {verb} is lost on command")
        return answer

    @staticmethod
    def _counted(counts, verb):
        left = counts.get(verb, 0)
        counts[verb] = max(left - 1, 0)
        return left > 0

    def open(self):
        return self._through("open")

    def read(self, key):
        return self._through("read", key)

    def swap(self, changes):
        return self._through("swap", changes)

    def executions(self, query):
        return self._through("executions", query)

    def held_leases(self, query):
        return self._through("held_leases", query)

    def prune(self, limit=1000):
        return self._through("prune", limit)

    def describe(self):
        return self.store.describe()

    def close(self):
        self.closed += 1
        self.store.close()

    def forget(self):
        self.store.forget()
