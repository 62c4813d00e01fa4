"""The group that all commands belong to."""

from __future__ import annotations

import click

from apscheduler_fence import __version__
from apscheduler_fence.cli.demo import demo
from apscheduler_fence.cli.doctor import doctor
from apscheduler_fence.cli.exits import FailingGroup
from apscheduler_fence.cli.inspect import missing, runs, show, status
from apscheduler_fence.cli.operate import prune, release, retry
from apscheduler_fence.cli.outbox import outbox
from apscheduler_fence.cli.run import run
from apscheduler_fence.cli.tables import init


@click.group(cls=FailingGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="apscheduler-fence")
def group() -> None:
    """Run each APScheduler job once per schedule slot in the whole cluster."""


for command in (demo, init, status, runs, show, missing, retry, release, prune, doctor, run, outbox):
    group.add_command(command)
