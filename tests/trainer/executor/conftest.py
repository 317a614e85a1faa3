"""What the tests of the executor share."""

from tests.support.small_captures import uncached as uncached
