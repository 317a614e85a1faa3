"""The link between the servers of a job: small messages both ways between server 0, the
coordinator, and each other server, ordered and exactly once.

In reading order::

    messages           numbers: what was said and not heard yet; pure
    link_end           one end: messages leave on the present stream, and again on the next
    follower_link      the end that dials: servers 1, 2, ...
    coordinator_links  the end that accepts: server 0

Messages are bytes here.  May import: the transports, control calls, security, config, errors,
polling and the generated messages.
"""
