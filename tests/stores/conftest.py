"""An open store of every kind, empty."""

import contextlib

import pytest

from apscheduler_fence.stores import open_store


@pytest.fixture
def open_another(store_url):
    """Opens the same store once more, as another node or another application would."""
    with contextlib.ExitStack() as opened:

        def open_another(namespace="test"):
            store = open_store(store_url, namespace)
            opened.callback(store.close)
            store.open()
            return store

        yield open_another


@pytest.fixture
def store(open_another):
    """An empty store, in a namespace of its own."""
    return open_another()
