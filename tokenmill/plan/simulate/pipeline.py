"""The stages that the engine loops of one deployment share: every step passes all of them, one step at a time each.

Steps enter in the order in which they begin and do not overtake each other, so a long prompt delays the decodes of the
other loops behind it: the pipeline's bubble. Knows nothing of requests; the replicas ask when a step ends.
"""

from __future__ import annotations


class Pipeline:
    def __init__(self, stages: int) -> None:
        self._free_at = [0.0] * stages

    def end(self, now: float, ms: float) -> float:
        """When a step that begins now and takes `ms` on idle stages has left the last one."""
        share = ms / len(self._free_at)
        for stage, free_at in enumerate(self._free_at):
            now = max(now, free_at) + share
            self._free_at[stage] = now
        return now
