"""Wrong inputs for a server, by the hundred thousand: see :mod:`tests.fuzz.__main__`."""
