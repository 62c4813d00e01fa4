"""`python -m apscheduler_fence.cli`."""

from apscheduler_fence.cli import main

main()
