"""``pserver web``: one page that shows a running job, and answers an operator's five questions.

In reading order::

    server     HTTP, the rights of visitors, and the job that is watched
    log_files  the last lines of logs

The job's state and history are those of ``pserver/telemetry/job_view.py``.
``static/`` holds the page: one HTML file, one style sheet, one script.  Nothing is built, and
nothing is loaded from elsewhere.

[Note: one page, one token]  The page shows the script's own numbers and names, so not every user of
this host may read it.  The user who opens the printed address has its token; the browser keeps it
as a cookie that no script and no other site can use.  A name that an attacker's DNS server points
to this host is refused by the Host header.  An act needs more: the process must hold an operator's
key, and the request a second token, which only the page itself receives.

May import: ``pserver.control``, ``pserver.security``, ``pserver.telemetry`` and the files of the
root.  Only ``pserver/__main__.py`` imports this room.
"""
