"""The group that all commands belong to."""

from __future__ import annotations

import click

from apscheduler_fence import __version__
from apscheduler_fence.cli.demo import demo
from apscheduler_fence.cli.outbox import outbox
from apscheduler_fence.cli.tables import init


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="apscheduler-fence")
def group() -> None:
    """Run each APScheduler job once per schedule slot in the whole cluster."""


group.add_command(demo)
group.add_command(init)
group.add_command(outbox)
