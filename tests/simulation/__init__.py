"""A cluster in one thread: the real rules, runner and keeper, with time, network, processes and faults made of numbers.

One integer, the seed, decides everything that happens in a `World`, so a failure is replayed by its seed alone:

    python -m tests.simulation --seed 4711        # with a trace of every step
    python -m tests.simulation --slots 100000     # from seed 0 until so many slots were simulated
    python -m tests.simulation --forever
"""

from .truth import Violation
from .world import World, simulate_many

__all__ = ["Violation", "World", "simulate_many"]
