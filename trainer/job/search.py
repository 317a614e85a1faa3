"""``strategy.auto`` and ``strategy.auto_search``: use the update mode that ``pserver plan --search
--write`` has found for this script.
"""

from __future__ import annotations

import copy
import logging
import sys
from typing import TYPE_CHECKING

from trainer.environment.environment import Connection, Role, RoleMaker
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:
    from pserver.launcher.planning.plan import Choice

log = logging.getLogger(__name__)

SWITCHES = ("auto", "auto_search")
# the settings that the search chooses
CHOSEN = (
    "a_sync",
    *(
        f"a_sync_configs.{key}"
        for key in ("k_steps", "half_async", "staleness", "dc_asgd", "outer_optimizer", "modes")
    ),
)


def searched(strategy: DistributedStrategy | None, role: RoleMaker) -> DistributedStrategy | None:
    """A strategy with the mode that was chosen for this script; without the two switches, the
    strategy itself.

    While ``pserver plan`` runs the script the mode is sync, from which a search starts.  It is also
    sync in a process that trains alone, which updates at once.

    Args:
        role: of this process, in a job with servers or alone.

    Raises:
        ValueError: the strategy itself sets what the search chooses; or there is no choice.
    """
    if not isinstance(strategy, DistributedStrategy):
        return strategy
    asked = [f"strategy.{name}" for name in SWITCHES if getattr(strategy, name)]
    if not asked:
        return strategy
    names = ", ".join(asked)
    by_hand = [f"strategy.{name}" for name in CHOSEN if strategy.is_set(name)]
    if by_hand:
        raise ValueError(
            f"{names}: excludes {', '.join(by_hand)}, which the search chooses; leave one of the "
            "two out"
        )
    found = copy.deepcopy(strategy)
    found.auto = found.auto_search = False
    given = Connection.from_environment()
    if role.role is Role.SINGLE or given.plan_only or given.probe:
        found.a_sync = False
        return found
    choice = _choice(names)
    found.a_sync = choice.mode != "sync"
    if choice.mode == "geo":
        found.a_sync_configs = {**strategy.a_sync_configs, "k_steps": choice.k_steps}
    _tell(names, choice, role)
    return found


def _choice(names: str) -> Choice:
    # here, because it imports the launcher, which few jobs need
    from pserver.launcher.planning.plan import Choice

    path = Choice.beside(sys.argv[0])
    try:
        return Choice.read(path)
    except OSError as error:
        raise ValueError(
            f"{names}: expected the choice for this script in {path}, which `pserver plan --search "
            f"--write` writes: {error.strerror or error}"
        ) from None


def _tell(names: str, choice: Choice, role: RoleMaker) -> None:
    k_steps = f" with k_steps={choice.k_steps}" if choice.k_steps else ""
    log.info("%s: mode %s%s", names, choice.mode, k_steps)
    here = len(role.server_endpoints), role.trainers
    if here != (choice.servers, choice.trainers):
        log.warning(
            "%s: the choice was made for %d servers and %d trainers, and this job has %d and %d",
            names,
            choice.servers,
            choice.trainers,
            *here,
        )
