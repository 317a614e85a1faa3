"""No thread left behind."""

from tests.support.streams import no_thread_stays

__all__ = ["no_thread_stays"]
