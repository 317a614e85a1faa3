"""How each command, and each process of a job, says by its exit status what has become of it: the
table of docs/errors.md, and the end of each command's help.
"""

from __future__ import annotations

from dataclasses import dataclass

USAGE = "wrong usage"


@dataclass(frozen=True, slots=True)
class ExitStatuses:
    """What the statuses of one process mean.

    Attributes:
        of: "pserver serve --once", "a trainer's script".
        zero, one: what 0 and 1 mean.
        two: what 2 means; "": nothing of its own.
        otherwise: which others there are, and when.
    """

    of: str
    zero: str
    one: str
    two: str = USAGE
    otherwise: str = ""


EVERY = (
    ExitStatuses(
        "pserver serve",
        "stopped by SIGTERM or SIGINT and drained, also where that ended a job",
        "could not start",
    ),
    ExitStatuses(
        "pserver serve --once",
        "the job has succeeded",
        "could not start, or the job failed",
        otherwise="128 + the signal that came before the job was done (143, 130)",
    ),
    ExitStatuses(
        "a trainer's script",
        "it ended, after `finish()`",
        "it raised, or ended without `finish()`, also where it has caught the job's failure",
        two="",
        otherwise="143: SIGTERM; what it gave to `sys.exit`",
    ),
    ExitStatuses(
        "a script whose role is PSERVER",
        "the job has succeeded, and the script ended",
        "the job failed (`fleet.run_server()`, `Executor.run` raise)",
        two="",
        otherwise="128 + the signal that came before the job was done",
    ),
    ExitStatuses(
        "pserver launch",
        "every process ended with 0",
        "a server did not get ready",
        otherwise="the status of the process that failed; 128 + the signal that ended it, or "
        "`launch`",
    ),
    ExitStatuses(
        "pserver plan",
        "the plan was printed, also without a prediction",
        "the script failed; with `--search`, a probe",
        otherwise="the script's own status",
    ),
    ExitStatuses("pserver manifest", "the file was written", "the disk refuses"),
    ExitStatuses(
        "pserver status",
        "every server answered, none has failed, and none waits for one that is away",
        "otherwise",
    ),
    ExitStatuses("pserver status --ready", "every server takes trainers", "otherwise"),
    ExitStatuses("pserver web", "stopped by SIGTERM or SIGINT", "could not start"),
    ExitStatuses(
        "pserver save",
        "the checkpoint was written",
        "a server does not answer, holds nothing or has another job; or the disk refuses",
    ),
    ExitStatuses(
        "pserver replay",
        "all that was asked for is applied; a log that ends early is said",
        "log and checkpoint do not belong together, or one is damaged; something is at `--to`; or "
        "the disk refuses",
    ),
    ExitStatuses(
        "pserver reset",
        "every server is empty",
        "a server does not answer, or has a running job",
    ),
    ExitStatuses("pserver drain", "every server drains", "a server does not answer, or refuses"),
    ExitStatuses("pserver keys", "the act is done", "it is not"),
)


def said(command: str) -> str:
    """What a command's help says of its exit statuses; backticks are the page's.

    Example:
        >>> print(said("drain"))
        exit status: 0: every server drains; 1: a server does not answer, or refuses; 2: wrong usage
    """
    rows = []
    for each in EVERY:
        if not each.of.startswith(f"pserver {command}"):
            continue
        statuses = {"0": each.zero, "1": each.one, "2": each.two, "otherwise": each.otherwise}
        meanings = (f"{status}: {meaning}" for status, meaning in statuses.items() if meaning)
        flag = each.of.partition(" --")[2]
        rows.append((f"with --{flag}: " if flag else "") + "; ".join(meanings))
    return "exit status: " + ". ".join(rows).replace("`", "")
