"""Manifests: the files by which others start a job: Kubernetes, Compose, Slurm.

In reading order::

    description  the job that a manifest describes, and its settings
    jobset       a JobSet of Kubernetes
    compose      a file for docker compose and podman-compose
    slurm        a batch script; ``batch_script.sh`` is the part that is the same for all jobs
    writing      ``pserver manifest``

A manifest is built as plain dicts and lists, the form in which its kind is documented, and PyYAML
writes them.  Templates of text would need conditions in the text (keys or none, a volume or none),
indentation by hand, and quoting of what the user has typed.  The batch script is a template of the
simplest kind: assignments, and then a file that is always the same and that shellcheck reads.

May import: ``pserver.config``.  It asks no cluster for anything, and starts nothing.
"""
