"""What ``pserver --help`` says of each command."""

from __future__ import annotations

EXAMPLES = """examples:
  pserver launch --servers 2 --trainers 2 train.py --epochs 3
      a local cluster; train.py is a trainer's script
  pserver launch --servers a:6174,b:6174 --trainers a:7000,b:7000 --host a train.py
      host a's part of a larger one; the same on b, with --host b
  pserver launch --nccl2 --trainers 2 train.py
      the collective mode: no servers, the trainers average their gradients among themselves
  pserver serve --endpoint 0.0.0.0:6174 --keys keys/a
      one parameter server, for trainers that are started by other means
  pserver plan train.py --servers 4 --trainers 8
      what that would put where, without starting any of it
  pserver manifest --kind slurm --servers 2 --trainers 4 train.py
      the same job as a file for Slurm, or for Kubernetes or docker compose
  pserver status a:6174,b:6174
      who is up, and what they hold
  pserver web a:6174,b:6174 --port 8090
      one page that shows the job, and answers an operator's questions
  pserver save a:6174,b:6174 rescued
      what a running or a failed job holds, as a checkpoint for fleet.load
  pserver replay log --from saved/step-000120 --to again
      applies a log that --record-log has recorded to a checkpoint of its job
  pserver reset a:6174,b:6174
      drops what a failed job has left, so that any job may begin
  pserver drain a:6174,b:6174
      ends servers, as SIGTERM does
  pserver keys init keys --hosts a,b
      keys for hosts a and b: copy keys/a and keys/b there, and name them with --keys
"""
SERVE = """Runs one parameter server.  It prints one line when it is ready, and ends with 0 on
SIGTERM or Ctrl-C after draining."""
LAUNCH = """Starts servers and trainers (or trainers alone), prefixes their output and files it, and
ends with the job's exit status."""
PLAN = """Shows which server would hold what, the bytes of a step and the memory of each server.
Then it runs some steps of SCRIPT with servers on this machine, for at most 30 s in all, and
predicts the step of the whole job and what limits it."""
MANIFEST = """Writes a job as the file that another system starts it by: a JobSet of Kubernetes, a
file for docker compose, or a batch script for Slurm.  It starts nothing, and writes no secret."""
STATUS = """Shows each server's state, what it holds, its trainers, and the bytes that have passed
through it."""


WEB = """Serves one page that shows a running job: who is there, where the time of a step goes, loss
and throughput, tables, logs.  It prints an address with a token, without which nobody reads it, and
ends with 0 on SIGTERM or Ctrl-C."""
SAVE = """Writes what the servers of a running or a failed job hold (parameters, buffers, tables,
optimizer state, step) as a checkpoint that fleet.load reads, on any number of servers.  A running
job waits meanwhile, between two of its steps.  The servers do not know everything: fleet.load says
what it has not found, a scheduler's state for one."""
REPLAY = """Applies a log that the servers of a job have recorded (--record-log) to a checkpoint of
that job, or to what the job began with, and gives what the servers held, to the bit: parameters,
optimizer states and rows.  It says what it has applied, and with --to writes a checkpoint that
fleet.load reads.  It starts no server."""
REPLAYS = "apply a recorded log to a checkpoint"
RESET = """Drops what a failed job has left on these servers, so that any job may begin.  A server
whose job runs is left alone: end its trainers first."""
DRAIN = """Ends servers, as SIGTERM does: each takes no new step, tells its trainers why, sends what
it has begun to send, and ends.  A job that runs there fails; save it first."""
KEYS = """Makes the keys with which the processes of a cluster know each other, and manages them.
The folder stays with the operator; each host gets a copy of its own part."""
ENDPOINTS = "HOST:PORT[,HOST:PORT...]"
