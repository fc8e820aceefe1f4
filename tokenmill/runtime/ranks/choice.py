"""Which executor a rank has. All ranks of a grid decide alike: by the model, the options and the grid."""

from __future__ import annotations

from tokenmill.config import ResolvedConfig
from tokenmill.log import get_logger
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.ranks import recorded
from tokenmill.runtime.ranks.duties import RankDuties
from tokenmill.runtime.ranks.executor import RankExecutor
from tokenmill.runtime.ranks.recorded import RankProgram
from tokenmill.runtime.ranks.seat import Seat

_log = get_logger(__name__)


def rank_executor(model: LoadedModel, store: KVStore, config: ResolvedConfig, seat: Seat) -> RankDuties:
    reason = recorded.declines(model, store, config, seat)
    # A rank may lack a kernel that another has: one that declines speaks for all.
    (may_record,) = seat.agree([int(reason is None)])
    if may_record:
        return RankProgram(model, store, config, seat)
    if seat.crew is not None:
        _log.info("ranks compute op by op: %s", reason or "another rank has no kernel for its part")
    return RankExecutor(model, store, config, seat)
