"""Becomes a command that does not outlive the process that started it. Linux only; run as a script.

Usage: child.py PARENT_PID COMMAND [ARGUMENT…]

A `run` that is killed outright can forward nothing, and its command would go on while another node is granted the lease.
So the kernel is asked to send SIGTERM to this process when its parent ends, and then it becomes the command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask, look whether the parent is still there, and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)
    # Python ignores these, and what is ignored stays ignored in the command.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606 - running what it is given is its purpose


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.stderr.write(f"apscheduler-fence: {sys.argv[2]}: {error.strerror}\n")
        sys.exit(126)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
