"""The trials of all kinds by one number: which kind, and which of its seeds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pserver.table.table import compile_kernels
from tests.checker import losses, scenario, worlds
from tests.checker.losses import Loss
from tests.checker.scenario import Scenario, of_seed
from tests.checker.tally import Played, actions
from tests.checker.trial import play
from tests.checker.world_trial import play_world
from tests.checker.worlds import DENSE_RULES, DIM, ROW_RULES, World, world_of
from transpiler.ir.rules import make
from transpiler.ir.tables import Segment, Table

KINDS = ("network", "losses", "world")
# of eight seeds in a row: the worlds have most to show
TURNS = ("network", "world", "world", "losses", "world", "world", "network", "world")

MODES = {"network": scenario.MODES, "losses": losses.MODES, "world": worlds.MODES}

Settings = Scenario | Loss | World


@dataclass(frozen=True, slots=True)
class Numbered:
    """One trial.

    Attributes:
        seed: by which it is found again.
        kind: one of ``KINDS``.
        settings: of the trial.
    """

    seed: int
    kind: str
    settings: Settings


def numbered(
    seed: int, kind: str | None = None, mode: str | None = None, transport: str | None = None
) -> Numbered:
    """The trial of a seed.

    Args:
        kind: of that kind alone; None: by turns.
        mode, transport: in place of those drawn; a kind that has no such mode draws its own, unless
            it is the only one.

    Raises:
        ValueError: no kind that may be played has such a mode.
    """
    having = [each for each in (kind,) if each] or KINDS
    if mode is not None and all(mode not in MODES[each] for each in having):
        known = sorted({name for each in having for name in MODES[each]})
        raise ValueError(f"expected a mode of {' or '.join(having)}, got {mode!r}: one of {known}")
    chosen = kind or TURNS[seed % len(TURNS)]
    if kind:
        own = seed
    else:
        own = seed // len(TURNS) * TURNS.count(chosen)
        own += TURNS[: seed % len(TURNS)].count(chosen)
    mode = mode if mode in MODES[chosen] else None
    settings: Settings
    if chosen == "network":
        settings = of_seed(own, mode, transport)
    elif chosen == "losses":
        asked = {"mode": mode, "transport": transport}
        settings = Loss(own, {name: value for name, value in asked.items() if value is not None})
    else:
        settings = world_of(own, mode, transport)
    return Numbered(seed, chosen, settings)


def run(trial: Numbered) -> Played:
    """Plays a trial to its end."""
    settings = trial.settings
    if isinstance(settings, Scenario):
        result = play(settings)
        return Played(
            trial.seed,
            trial.kind,
            settings.mode,
            settings.transport,
            f"{result}" if result.failure else "",
            actions(result.faults),
            features=["tables"] if settings.table_names else [],
        )
    if isinstance(settings, Loss):
        events = {"dies": 1} | ({"joins": 1} if settings.again else {})
        failure = losses.play(settings)
        return Played(
            trial.seed, trial.kind, settings.mode, settings.transport, failure, {}, events
        )
    outcome = play_world(settings)
    return Played(
        trial.seed,
        trial.kind,
        settings.mode,
        settings.transport,
        f"{outcome}" if outcome.failure else "",
        actions(outcome.faults),
        dict(outcome.events),
        settings.features,
    )


def warm_up() -> None:
    """Compiles or loads what first trials would else wait for: the kernels of rows, and what
    torch's optimizers import when they are used.
    """
    table = Table("t", DIM, (Segment(0, DIM, 0),))
    for rule in ROW_RULES.values():
        compile_kernels(table, [rule])
    for rule in DENSE_RULES.values():
        value = torch.ones(2)
        optimizer = make(rule, [value])
        value.grad = torch.ones(2)
        optimizer.step()


def smallest(trial: Numbered) -> str:
    """A simpler trial of the same seed that fails too; "" where no simpler one does."""
    found, settings = "", trial.settings
    candidates: list[Settings] = [] if isinstance(settings, Loss) else [*settings.smaller()]
    while candidates:
        played = run(Numbered(trial.seed, trial.kind, candidates.pop(0)))
        if played.failure:
            found = played.failure
            break
    return found
