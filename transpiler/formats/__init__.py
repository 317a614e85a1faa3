"""The forms of a program outside this package.

In reading order::

    serialize      protobuf messages (Program.to_proto, from_proto)
    program_file   files (Program.save, load)
    plan_message   plans, deployments and hyper-parameters as messages
    table_message  tables as messages
    canonical      the bytes under a fingerprint (Program.fingerprint)
    phases         the phase of a step that an op belongs to
    op_defaults    what the text of an op leaves out
    text           readable text (str(program))
    panels         where blocks are in a picture
    svg            a picture (Program.draw)
    table_text     tables as readable text
    plan_bytes     what servers of a plan hold and exchange
    plan_text      a plan as readable text (pserver plan)
    block_message  blocks, ops and their arguments as protobuf messages, and back
    difference     how two programs differ, in words

The room may import ir and plan, and the generated messages of program.proto.
"""
