"""A server's answers to ``pserver status`` and ``pserver save``: its trainers, its contents."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pserver import wire_pb2 as wire
from pserver.config import ServerConfig
from pserver.job.background_saves import SaveProgress
from pserver.job.program import InstalledProgram
from pserver.job.reload import Reload
from pserver.leases.epoch import Account
from pserver.membership.members import Membership, stragglers
from pserver.telemetry.counts import TrainerCounts
from pserver.telemetry.metrics import in_words, versions
from transpiler.files.files import shown
from transpiler.formats.messages import hparams_to_proto

# of an account, as a status has it
COUNTED = (*("unit", "samples", "decided", "leased", "skipped", "handed_back", "left_out", "over"),)


def trainer_statuses(
    members: Membership, counts: TrainerCounts | None, now: float, config: ServerConfig
) -> list[wire.TrainerStatus]:
    """One status for each trainer that has joined, by number.  The caller holds the job's lock.

    Args:
        counts: of their steps; None: there are none.
        now: in seconds of the job's clock.
        config: the server's.
    """
    slow = stragglers(members.joined(), config.straggler_factor)
    return [
        wire.TrainerStatus(
            trainer_id=member.trainer,
            state=member.word,
            step=max((watermark.applied for watermark in member.watermarks.values()), default=0),
            transport=member.transport,
            silence_seconds=now - member.last_heard,
            activity=member.waiting or member.activity,
            report=member.report,
            compute_seconds=member.pace.seconds,
            behind=slow.get(member.trainer, 0.0),
            kept_seconds=max(0.0, members.reserved.get(member.trainer, now) - now),
            counts={} if counts is None else counts.of(member.trainer),
            kept_lookup_bytes=member.kept_bytes,
        )
        for _, member in sorted(members.by_trainer.items())
    ]


def lane_statuses(installed: InstalledProgram) -> list[wire.LaneStatus]:
    """One status for each lane.  The caller holds the job's lock."""
    found = []
    for lane in installed.lanes:
        totals = installed.steps.lanes[lane.index].totals
        found.append(
            wire.LaneStatus(
                mode=lane.lane.mode,
                version=lane.version,
                queued=lane.queued,
                steps=totals.steps,
                step_seconds=totals.step_seconds,
                updates=totals.updates,
                update_seconds=totals.update_seconds,
                wait_seconds=totals.wait_seconds,
                stale_pushes=totals.stale_pushes,
                stale_steps=totals.stale_steps,
                most_stale_steps=totals.most_stale_steps,
            )
        )
    return found


def program_status(installed: InstalledProgram) -> wire.StatusReply:
    """The part of a status that is about the installed program.  Tables take their own locks."""
    tables = [
        wire.TableStatus(
            name=name, rows=len(table.rows), bytes_held=table.bytes_held, counters=table.counters()
        )
        for name, table in installed.tables.items()
    ]
    settings = {name: each.strip("'") for name, each in installed.plan.settings().items()}
    settings["versions"] = in_words(versions(torch.__version__))
    return wire.StatusReply(
        mode=installed.plan.mode,
        slices=len(installed.slices.values),
        bytes_held=installed.slices.bytes_held + sum(table.bytes_held for table in tables),
        version=installed.version,
        tables=tables,
        settings=settings,
        recording=recording_status(installed),
        epochs=epoch_statuses(installed.leases.accounts),
    )


def reload_status(
    reply: wire.StatusReply, installed: InstalledProgram | None, reload: Reload | None
) -> None:
    """Adds the awaited servers, and the losses of this server where it has come back.
    The caller holds the job's lock.
    """
    if installed is not None:
        reply.away.extend(installed.decisions.awaited)
        reply.awaits_servers = installed.decisions.awaits and reply.state == "serving"
    if reload is not None and reload.done:
        reply.reload.file = shown(reload.path)
        reply.reload.steps = sum(loss.steps for loss in reload.lost.values())
        reply.reload.rows = sum(loss.rows for loss in reload.lost.values())
        for trainer, loss in reload.lost.items():
            reply.reload.steps_by_trainer[trainer] = loss.steps


def epoch_statuses(accounts: Mapping[int, Account]) -> list[wire.EpochStatus]:
    """The progress of the running epochs' samples; of the last epoch's, where none is running."""
    shown = [number for number, each in accounts.items() if not each.over] or sorted(accounts)[-1:]
    return [
        wire.EpochStatus(
            number=number,
            **{name: getattr(accounts[number], name) for name in COUNTED},
        )
        for number in sorted(shown)
    ]


def save_status(save: SaveProgress) -> wire.SaveStatus:
    """The last save in the background."""
    return wire.SaveStatus(
        number=save.number,
        file=shown(save.path),
        done=save.done,
        failure=save.failure,
        bytes=save.bytes,
        seconds=save.seconds,
        pause_seconds=save.pause_seconds,
    )


def recording_status(installed: InstalledProgram) -> wire.RecordingStatus | None:
    """The status of the job's recorded log; None: there is none."""
    recorder = installed.recording.recorder
    if recorder is None:
        return None
    place = installed.log_place
    return wire.RecordingStatus(
        recording=recorder.recording,
        entry=place.get("entry", 0),
        record=place["record"],
        failure=recorder.failure,
        tables={name: table.metadata() for name, table in installed.tables.items()},
        versions=[lane.version for lane in installed.lanes],
    )


def observed(installed: InstalledProgram, members: Membership) -> wire.ObserveReply:
    """The progress of the job, for an observer."""
    applied = [
        member.step(lane)
        for member in members.by_trainer.values()
        for lane in range(len(installed.lanes))
    ]
    hparams = {group: values for lane in installed.lanes for group, values in lane.hparams.items()}
    return wire.ObserveReply(
        versions=[lane.version for lane in installed.lanes],
        step=max(applied, default=0),
        hparams=[
            wire.GroupHparams(group=group, values=hparams_to_proto(values))
            for group, values in sorted(hparams.items())
        ],
        recording=recording_status(installed),
    )
