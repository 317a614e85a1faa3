"""``pserver web``: one page that shows a running job, and answers an operator's five questions.

In reading order::

    web          the process: flags become a collector and a page, until a signal comes
    collector    asks every server each second; one lock
    watched      what is known of the job as of now, and its curves: pure
    happenings   what has happened, on the time axis: pure
    sightings    what servers have said at one moment, and rates between two: pure
    step_split   where a step's time goes: pure
    curves       values over time, bounded by thinning: pure
    job_view     the job as the page shows it, JSON-able: pure
    table_view   its tables: pure
    answers      the five answers, a sentence each: pure
    log_files    the last lines of a log, and of no other file
    visitors     who may read, who may act: token, host, origin
    acts         save and drain, one at a time
    page_server  HTTP

``static/`` holds the page: one HTML file, one style sheet, one script.  Nothing is built, and
nothing is loaded from elsewhere.

[Note: one page, one token]  The page shows the script's own numbers and names, so not every user of
this host may read it.  Who opens the printed address has its token; the browser keeps it as a
cookie that no script and no other site can use.  A name that an attacker's DNS server points to
this host is refused by the Host header.  Acting asks for more: the process must hold an operator's
key, and the request a second token, which only the page itself is told.

May import: ``pserver.launcher`` (how a server is asked), ``pserver.control``, ``pserver.security``,
the generated messages and the files of the root.  Only ``pserver/__main__.py`` imports this room.
"""
