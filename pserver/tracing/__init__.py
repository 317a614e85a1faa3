"""A trace: what every process of a job does in a few steps, in one file, on one clock.

In reading order::

    spans         what one process has done, and when, by its own clock
    clock_offset  how far another process's clock is ahead, and within what bound
    recording     the spans of one process, as they travel
    chrome        the recordings of all processes as one file for Chrome's and Perfetto's viewers

[Note: one clock]  Each process times its spans by a clock that never goes back and whose origin is
its own.  A process that asks another for its clock knows two moments between which that has
answered: when it asked, and when the answer was there.  So the other's clock is ahead by its answer
less the middle of the two, and no further off than half of the time between them, however unequal
the way there and the way back are.  Of several rounds the shortest has the smallest bound.  That is
NTP's method; heartbeats, and the calls by which a trace begins and ends, are the rounds.  A round
says nothing of how clocks drift afterwards, so only rounds since the trace's begin count.

[Note: what a trace costs]  Where no trace is under way each place that would note a span tests one
attribute: some 15 ns.  A span that is noted costs below a microsecond.

It imports the standard library alone.
"""
