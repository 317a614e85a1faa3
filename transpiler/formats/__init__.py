"""The forms of a program outside this package.

In reading order::

    messages      programs, plans and tables as protobuf messages; fingerprints
    program_file  files (Program.save, load)
    text          readable text (str(program))
    svg           a picture (Program.draw)

The room may import ir and plan, and the generated messages of program.proto.
"""
