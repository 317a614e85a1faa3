"""Promises of the command line: what is typed wrongly is one line on stderr and exit status 2; what
goes wrong, status 1; Ctrl-C, status 130.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pserver import __version__
from pserver.__main__ import main
from pserver.config import ServerConfig
from pserver.errors import Unreachable
from pserver.launcher.cluster import free_port, visible_devices


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, (out, err)
    return err


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations that ``serve`` was given, instead of serving."""
    from pserver.service import server

    given: list[ServerConfig] = []
    monkeypatch.setattr(server, "serve", lambda config: given.append(config) or 0)
    return given


HERE = "tests/pserver/test_command.py"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "COMMAND"),
        ("fly", "invalid choice: 'fly'"),
        ("lanch --servers 1", "; did you mean launch? (see"),
        ("serve --endpoint here", "expected an endpoint HOST:PORT"),
        ("serve --transport pigeon", "invalid choice: 'pigeon'"),
        ("serve --data-port x", "invalid int value: 'x'"),
        ("serve --data-port 70000", "pserver serve: --data-port: expected 0 to 65535, got 70000"),
        (
            "serve --heartbeat-timeout 0",
            "pserver serve: --heartbeat-timeout: expected a number of seconds above 0",
        ),
        ("serve --heartbeat-timeout nan", "--heartbeat-timeout: expected a number of seconds"),
        ("serve --start-timeout inf", "--start-timeout: expected a number of seconds"),
        ("serve --threads -1", "--threads: expected 0 or more"),
        ("serve --endpoint a:70000", "--endpoint: expected an endpoint HOST:PORT"),
        (f"launch --servers 1 --trainers 1 --start-timeout inf {HERE}", "--start-timeout: exp"),
        (f"launch --nccl2 --trainers 2 --heartbeat-timeout nan {HERE}", "--heartbeat-timeout: e"),
        (f"launch --nccl2 --devices 0,90 {HERE}", "of GPUs that this process sees"),
        (f"launch --nccl2 --devices 0,x {HERE}", "of GPUs that this process sees"),
        (f"launch --nccl2 --devices=-1,0 {HERE}", "of GPUs that this process sees"),
        (f"launch --nccl2 --devices 0,0 {HERE}", "--devices: expected 2 different ones"),
        (f"launch --nccl2 --trainers 3 --devices 0,1 {HERE}", "--devices: expected 3 different"),
        ("serve --config nowhere.toml", "nowhere.toml"),
        ("launch --servers 1 --trainers 1", "SCRIPT"),
        ("launch --server 1 --trainers 1 x.py", "arguments: --server; did you mean --servers?"),
        ("status h:1 --jsno", "unrecognized arguments: --jsno; did you mean --json?"),
        ("serve --max-p 3", "arguments: --max-p 3; did you mean --max-program?"),
        ("drain h:1 --zzz", "unrecognized arguments: --zzz (see"),
        ("keys show d --jso", "unrecognized arguments: --jso"),
        ("replay log --overwrite", "--overwrite: has no effect without --to"),
        ("launch --servers 1 x.py", "expected both --servers and --trainers"),
        (
            "launch x.py --servers 1 --trainers=1",
            "; --servers and --trainers behind x.py went to the script: write SCRIPT last",
        ),
        ("launch --servers 1 --trainers 1 nowhere.py", "there is no file 'nowhere.py'"),
        ("launch --servers 0 --trainers 1 x.py", "--servers: expected 1 or more, got 0"),
        ("launch --servers 1 --trainers a:1 --host a x.py", "expected two numbers"),
        ("launch --servers 1 --trainers x x.py", "got --servers 1 --trainers x without --host"),
        ("launch --nccl2 --servers 1 --trainers 2 x.py", "--servers: expected none with --nccl2"),
        ("launch --nccl2 x.py", "expected --trainers"),
        ("launch --nccl2 --trainers 0 x.py", "--trainers: expected 1 or more"),
        ("launch --nccl2 --trainers a:1,b:1 x.py", "--trainers: expected --host HOST"),
        (
            "launch --nccl2 --trainers 2 --devices 0 tests/pserver/test_command.py",
            "--devices: expected 2 different ones",
        ),
        (
            "launch --nccl2 --trainers 2 --store s3://b/x tests/pserver/test_command.py",
            "--store: has no effect with --nccl2",
        ),
        (
            "launch --servers 1 --trainers 1 --store a::s3://b tests/pserver/test_command.py",
            "--store: expected one URL, got the chain",
        ),
        (
            "serve --endpoint 0.0.0.0:0",
            "--endpoint: 0.0.0.0:0 is beyond this host: expected keys",
        ),
        (
            "launch --servers a:1 --trainers a:2 --host a tests/pserver/test_command.py",
            "--servers: a:1 is beyond this host: expected keys",
        ),
        (
            "serve --insecure --keys k",
            "--insecure: expected this or keys, got both",
        ),
        (
            "launch --nccl2 --trainers 2 --data-dir d tests/pserver/test_command.py",
            "--data-dir: has no effect with --nccl2",
        ),
        (
            "launch --servers 1 --trainers 2 --devices 0,1 tests/pserver/test_command.py",
            "--devices: belongs to the collective mode",
        ),
        ("status nowhere", "expected an endpoint HOST:PORT"),
        ("status h:1 --watch x", "--watch: expected a number of seconds above 0"),
        ("status h:1 --ready --json", "--json: has no effect with --ready"),
        ("web nowhere", "expected an endpoint HOST:PORT"),
        ("web h:1 --port x", "expected a port of 0 to 65535, got 'x' (0 is any free one)"),
        ("web h:1 --host 0.0.0.0", "--host: 0.0.0.0:0 is beyond this host: expected keys"),
        ("web h:1 --host a --keys nowhere", "keys: expected a folder with the file server.key"),
        ("web h:1 --insecure --keys k", "insecure: expected this or keys, got both"),
        (f"launch --nccl2 --trainers 2 --web=0 {HERE}", "--web: has no effect with --nccl2"),
        ("launch --servers 1 --trainers 1 --web x.py", "right before SCRIPT write --web=0"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    """Each mistake is named, and nothing is started."""
    try:
        status: Any = main(line.split())
    except SystemExit as stopped:
        status = stopped.code

    assert status == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    ("devices", "gpus", "visible", "named"),
    [
        ("0 1", 2, None, "0 1"),
        ("1 0", 2, "", "1 0"),
        ("0 1", 2, "4, 7", "4 7"),
        ("1", 2, "GPU-a,GPU-b", "GPU-b"),
    ],
)
def test_devices_are_the_gpus_that_the_launcher_sees(
    devices: str, gpus: int, visible: str | None, named: str
) -> None:
    """Their names are those of CUDA_VISIBLE_DEVICES where it is set."""
    found = visible_devices(devices.split(), gpus, visible)

    assert list(found) == named.split()


@pytest.mark.parametrize(
    ("devices", "gpus", "words"),
    [
        ("0 1", 0, r"sees \(none\), got 0, 1; without GPUs leave --devices out"),
        ("0 1", 1, r"sees \(0\), got 1$"),
        ("0 2 x -1", 2, r"sees \(0 to 1\), got 2, x, -1$"),
        ("0 \u00b2", 4, r"sees \(0 to 3\), got"),
    ],
)
def test_devices_that_are_not_there_are_refused(devices: str, gpus: int, words: str) -> None:
    """All of them are named."""
    with pytest.raises(ValueError, match=words):
        visible_devices(devices.split(), gpus, None)


@pytest.mark.parametrize("variable", ["PSERVER_HEARTBEAT_TIMEOUT", "PSERVER_START_TIMEOUT"])
@pytest.mark.parametrize("text", ["-1", "inf", "soon"])
def test_a_wrong_variable_is_named_not_the_field(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a server, as the user wrote it; so is the key of a file."""
    monkeypatch.setenv(variable, text)

    assert main(["serve"]) == 2
    assert f"pserver serve: {variable}: expected a number of seconds" in one_line(capsys)


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("CONNECTIONS", "x", "expected 1 to 64, got 'x'"),
        ("CONNECTIONS", "65", "expected 1 to 64, got 65"),
        ("CHECKSUM", "of", "expected one of auto, on, off, got 'of'"),
    ],
)
def test_the_variables_of_tcp_are_those_of_the_flags(
    variable: str,
    text: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: list[ServerConfig],
) -> None:
    """``launch`` gives its servers its own environment."""
    monkeypatch.setenv("PSERVER_CONNECTIONS", "3")
    monkeypatch.setenv("PSERVER_CHECKSUM", "off")
    assert main(["serve"]) == 0
    assert (served[0].connections, served[0].checksum) == (3, "off")
    assert main(["serve", "--transport", "grpc"]) == 2
    assert "has no effect with transport 'grpc'" in one_line(capsys)
    monkeypatch.setenv(f"PSERVER_{variable}", text)
    assert main(["serve"]) == 2
    assert f"pserver serve: PSERVER_{variable}: {words}" in one_line(capsys)


def test_a_wrong_value_in_a_file_is_named_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its path, and the key."""
    path = tmp_path / "server.toml"
    path.write_text("heartbeat_timeout_seconds = inf")

    assert main(["serve", "--config", str(path)]) == 2
    assert f"--config {path}: heartbeat_timeout_seconds: expected" in one_line(capsys)


def test_serve_flags_are_the_fields_of_the_configuration(
    served: list[ServerConfig], tmp_path: Path
) -> None:
    """Every flag sets its field; a file sets fields by name; a flag overrides the file."""
    path = tmp_path / "server.toml"
    path.write_text(
        'endpoint = "127.0.0.1:7000"\nthreads = 3\nonce = true\nheartbeat_timeout_seconds = 5\n'
    )
    flags = (
        "--data-port 7001 --transport tcp --data-dir d --heartbeat-timeout 9.5 "
        "--start-timeout 8 --program p --threads 1 --once --connections 4 --checksum on"
    )

    assert (
        main(["serve"])
        == main(["serve", *flags.split()])
        == main(["serve", "--config", str(path), "--threads", "4"])
        == 0
    )
    assert served[0] == ServerConfig()
    assert served[1] == ServerConfig(
        data_port=7001,
        transport="tcp",
        data_dir="d",
        heartbeat_timeout_seconds=9.5,
        start_timeout_seconds=8.0,
        program="p",
        threads=1,
        once=True,
        connections=4,
        checksum="on",
    )
    assert served[2] == ServerConfig(
        endpoint="127.0.0.1:7000", threads=4, once=True, heartbeat_timeout_seconds=5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = 1\n", "unknown key port; expected some of"),
        ('threads = "2"\n', "threads: expected a value like"),
        ("threads = true\n", "threads: expected a value like"),
        ("endpoint = 6174\n", "endpoint: expected a value like"),
        ("threads = \n", "server.toml"),
        ('insecure = true\nkeys = "k"\n', "insecure: expected this or keys, got both"),
    ],
)
def test_a_wrong_file_of_settings_is_refused(
    served: list[ServerConfig],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    message: str,
) -> None:
    """Unknown keys, wrong types and settings without effect are named, and no server starts."""
    path = tmp_path / "server.toml"
    path.write_text(text)

    assert main(["serve", "--config", str(path)]) == 2
    assert message in one_line(capsys) and not served


def test_what_goes_wrong_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of the cluster or of the system becomes its message, without a traceback."""
    from pserver.service import server

    def fail(config: ServerConfig) -> int:
        raise Unreachable("127.0.0.1:6174\ndoes not answer")

    monkeypatch.setattr(server, "serve", fail)

    assert main(["serve"]) == 1
    assert one_line(capsys) == "pserver serve: 127.0.0.1:6174 does not answer\n"


def test_ctrl_c_is_one_line_and_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that does not handle SIGINT itself shows no traceback."""

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("pserver.cli.check.show", interrupt)
    assert main(["check", HERE]) == 130
    assert one_line(capsys) == "pserver check: interrupted\n"


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """``pserver --version`` is ``pserver.__version__``."""
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pserver {__version__}\n"


@pytest.mark.processes
def test_help_shows_how_each_command_is_used() -> None:
    """``python -m pserver --help`` has examples, and each command shows its flags."""
    texts = []
    for command in ([], ["serve"], ["launch"], ["status"]):
        line = [sys.executable, "-m", "pserver", *command, "--help"]
        texts.append(
            subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
        )

    assert "pserver launch --servers 2 --trainers 2 train.py" in texts[0]
    assert "--config FILE.toml" in texts[1] and "HOST:PORT" in texts[2]
    assert (
        "pserver launch --nccl2 --trainers 2 train.py" in texts[0]
        and "--devices 0,1,..." in texts[2]
    )


def test_status_shows_an_unreachable_server_and_ends_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that is not there has a row that says so."""
    endpoint = f"127.0.0.1:{free_port()}"

    assert main(["status", endpoint]) == 1
    out = capsys.readouterr().out
    assert endpoint in out and "unreachable" in out
