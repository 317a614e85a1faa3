"""Stores behind URLs: fsspec's memory, and moto's S3 server in a process of its own."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
BUCKET = "bucket"


def _bucket(endpoint: str) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """A running S3 API with an empty bucket: the environment of who talks to it."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        port = next(line for line in server.stdout if line.strip().isdigit()).strip()
        endpoint = f"http://127.0.0.1:{port}"
        _bucket(endpoint)
        yield {**KEYS, "AWS_ENDPOINT_URL": endpoint}
    finally:
        server.stdin.close()
        server.wait()
        server.stdout.close()


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.processes)])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new, empty prefix."""
    name = secrets.token_hex(4)
    if request.param == "memory":
        return f"memory://{name}"
    found: dict[str, str] = request.getfixturevalue("s3")
    for key, value in found.items():
        monkeypatch.setenv(key, value)
    return f"s3://{BUCKET}/jobs/{name}"
