"""Run each APScheduler job once per schedule slot in the whole cluster, fenced."""

__version__ = "0.1.0"
