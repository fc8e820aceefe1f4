"""What a server keeps on disk: the traffic log, the files of clients, and what keys have used. Used by server.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.serve.config import ServeConfig
from tokenmill.serve.files.store import FileStore
from tokenmill.serve.supervision.signals import in_daemon_thread
from tokenmill.serve.traffic_log import TrafficLog
from tokenmill.serve.usage_file import UsageFile

if TYPE_CHECKING:
    from tokenmill.serve.service import Service


@dataclass(slots=True)
class Storage:
    """What a server keeps on disk, as far as its options say so. Disks may hang: they are used in threads."""

    traffic_log: TrafficLog | None = None
    files: FileStore | None = None
    usage: UsageFile | None = None

    async def open(self, config: ServeConfig, name: str) -> None:
        if config.traffic_log:
            opening = in_daemon_thread(lambda: TrafficLog(config.traffic_log, name, config.traffic_log_size))
            self.traffic_log = await opening
        if config.files_dir:
            self.files = await in_daemon_thread(lambda: FileStore(config.files_dir, config.max_files_size))
        if config.usage_file:
            self.usage = await in_daemon_thread(lambda: UsageFile(config.usage_file))

    def attach(self, service: Service) -> None:
        if self.traffic_log is not None:
            service.record_traffic(self.traffic_log)
        service.files = self.files
        if self.usage is not None:
            self.usage.load_into(service.accounts)

    def start(self, service: Service) -> list[asyncio.Task[None]]:
        """Go on with batches, and begin to keep what is used: the tasks to cancel at the end."""
        if service.batches is not None:
            service.batches.start()
        return [] if self.usage is None else [asyncio.create_task(self.usage.keep(service.accounts))]

    async def close(self, service: Service | None) -> None:
        if self.traffic_log is not None:
            await in_daemon_thread(self.traffic_log.close)
        if self.files is not None:
            self.files.close()
        usage = self.usage
        if usage is not None:
            await in_daemon_thread(lambda: usage.close(service.accounts if service is not None else None))
