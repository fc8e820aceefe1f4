"""Processor priority of work beside the steps: compilers and text workers take what the engine leaves of the processor.

Called at the start of such a thread, and of a process that does nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

_NICE = 10  # a tenth of a busy core: it goes on, and the engine hardly notices


def lower_thread_priority() -> None:
    """Of the calling thread alone: on Linux each has its own. Elsewhere it competes."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)


def lower_session_priority() -> None:
    """Of the session that this process leads: Linux may divide the processor among sessions first (autogroups), and
    priorities of threads then compare only within one."""
    with contextlib.suppress(OSError, AttributeError):
        if os.getsid(0) == os.getpid():
            Path("/proc/self/autogroup").write_text(str(_NICE))
