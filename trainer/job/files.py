"""The file system of a job, by ``fs_client_param``: a login, and Hadoop's own client."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pserver.storage.remote import Login, log_in, log_out
from trainer.compat.flags import ProcessSettings
from transpiler.strategy.strategy import DistributedStrategy

HADOOP_SECONDS = 60.0  # for `hadoop classpath`, which starts a Java machine
_HDFS = ("hdfs://", "viewfs://")


class FileSystem:
    """The login at a job's file system, while the job runs."""

    def __init__(self) -> None:
        self._logins: list[Login] = []

    def log_in(self, strategy: DistributedStrategy, process: ProcessSettings) -> None:
        """Logs in, as a strategy asks.

        Args:
            process: receives Hadoop's environment variables, for pyarrow.

        Raises:
            ValueError: the file system takes no user or password, or there is no such hadoop
                command.
            ImportError: the package for the file system is not installed.
        """
        settings = strategy.fs_client_param
        if not settings["uri"]:
            return
        try:
            login = Login(settings["uri"], settings["user"], settings["passwd"])
            if settings["hadoop_bin"]:
                process.environment(_hadoop(settings["uri"], settings["hadoop_bin"]))
        except ValueError as error:
            raise ValueError(f"strategy.fs_client_param: {error}") from None
        except ImportError as error:
            raise ImportError(f"strategy.fs_client_param: {error}") from error
        self.leave()
        log_in(login)
        self._logins.append(login)

    def leave(self) -> None:
        """Logs out."""
        while self._logins:
            log_out(self._logins.pop())


def _hadoop(uri: str, command: str) -> dict[str, str]:
    """The variables by which pyarrow finds Hadoop's library and classes.

    Raises:
        ValueError: the file system is not Hadoop's, or the command does not answer.
    """
    if not uri.startswith(_HDFS):
        raise ValueError(f"hadoop_bin acts with a uri of {' or '.join(_HDFS)} only")
    path = Path(command).expanduser()
    path = path / "hadoop" if path.is_dir() else path
    try:
        answer = subprocess.run(
            [str(path), "classpath", "--glob"],
            capture_output=True,
            text=True,
            timeout=HADOOP_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"hadoop_bin: expected a command that answers to `classpath --glob`, got {path}: "
            f"{type(error).__name__}"
        ) from None
    return {"HADOOP_HOME": str(path.resolve().parent.parent), "CLASSPATH": answer.stdout.strip()}
