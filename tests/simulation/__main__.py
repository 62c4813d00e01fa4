# ruff: noqa: T201 - a program that prints
"""Run worlds until the slots are used up, or replay one; the exit status is 1 after a violation."""

import argparse
import itertools
import sys
import time

from . import Violation, World

parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
parser.add_argument("--seed", type=int, help="replay this world and print every step of it")
parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
parser.add_argument("--slots", type=int, default=20_000, help="stop after so many slots (20000)")
parser.add_argument("--forever", action="store_true", help="stop at the first violation only")
options = parser.parse_args()


def replay(seed):
    """Play one world again with its trace."""
    world = World(seed, trace=True)
    try:
        world.run()
    except Violation as violation:
        print(*world.steps, f"seed {seed}: {violation}", sep="\n")
        return 1
    print(*world.steps, f"seed {seed}: no violation; faults: {', '.join(world.faults) or 'none'}", sep="\n")
    return 0


if options.seed is not None:
    sys.exit(replay(options.seed))

began, slots, refused = time.monotonic(), 0, 0
for seed in itertools.count(options.first):
    world = World(seed)
    try:
        slots += world.run()
    except Violation as violation:
        print(f"seed {seed}: {violation}\nreplay it with: python -m tests.simulation --seed {seed}")
        sys.exit(1)
    refused += world.truth.refused_writes
    if seed % 200 == 199 or (slots >= options.slots and not options.forever):
        took = time.monotonic() - began
        print(f"{slots} slots in {seed + 1 - options.first} worlds, {slots / took:.0f} a second; "
              f"{refused} stale writes refused by the guard", flush=True)  # fmt: skip
    if slots >= options.slots and not options.forever:
        break
