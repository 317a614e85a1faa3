"""Which small faults of the product do the tests not see?  See ``__main__.py``."""
