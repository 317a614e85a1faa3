"""The forms of a program outside this package.

In reading order::

    serialize.py       protobuf messages (Program.to_proto, from_proto)
    program_file.py    files (Program.save, load)
    plan_message.py    plans, deployments and hyper-parameters as messages
    table_message.py   tables as messages
    canonical.py       the bytes under a fingerprint (Program.fingerprint)
    phases.py          the phase of a step that an op belongs to
    op_defaults.py     what the text of an op leaves out
    text.py            readable text (str(program))
    panels.py          where blocks are in a picture
    svg.py             a picture (Program.draw)
    table_text.py      tables as readable text
    plan_bytes.py      what servers of a plan hold and exchange
    plan_text.py       a plan as readable text (pserver plan)

The room may import ir and plan, and the generated messages of program.proto.
"""
