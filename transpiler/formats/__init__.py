"""The forms of a program outside this package.

In reading order::

    messages      plans, deployments and hyper-parameters as messages; protobuf messages
                  (Program.to_proto, from_proto); tables as messages; the bytes under a fingerprint
                  (Program.fingerprint)
    program_file  files (Program.save, load)
    text          readable text (str(program))
    svg           a picture (Program.draw)

The room may import ir and plan, and the generated messages of program.proto.
"""
