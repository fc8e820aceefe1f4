"""A rank as a process: `python -m tokenmill.runtime.ranks.process DESCRIPTOR`, started by processes.py."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from tokenmill.config import ResolvedConfig
from tokenmill.errors import UserError
from tokenmill.hardware.sharding import Grid
from tokenmill.model.group import RankError
from tokenmill.runtime.ranks.follow import follow
from tokenmill.runtime.ranks.follower import report
from tokenmill.runtime.ranks.groups import make_group
from tokenmill.runtime.ranks.processes import SocketLink
from tokenmill.runtime.ranks.seat import Seat
from tokenmill.runtime.ranks.wire import Numbers, encode

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when rank 0 ends, even while it is stopped. Linux only; elsewhere the socket
    tells, once it is read."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    link = SocketLink(int(sys.argv[1]))
    spec = json.loads(link.receive())
    die_with(spec["parent"])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is rank 0's to handle
    try:
        config, place = ResolvedConfig(**spec["config"]), Grid(**spec["grid"]).place(spec["rank"])
        link.send(encode(Numbers([])))
        group = make_group(place, spec["meeting"], config.rank_timeout, config.device, spec["memory"])
        follow(Path(spec["model"]), config, Seat(place, group, config.exact_ranks, link=link))
    except BaseException as error:
        if not isinstance(error, RankError | UserError):
            traceback.print_exc()
        report(link, error)
        os._exit(1)
    os._exit(0)  # gloo's threads have no end of their own


if __name__ == "__main__":
    main()
