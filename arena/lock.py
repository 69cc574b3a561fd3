"""The arena's lock."""

from threading import RLock


class ArenaLock:
    """`with lock:` for bookkeeping. Re-entrant only to be noticed: a finaliser or signal handler that interrupts the
    arena inside finds the state between two truths.

    Takes and releases, to whom two calls are much, do what the methods do themselves.
    """

    __slots__ = ("_name", "inside", "rlock")

    def __init__(self, name: str) -> None:
        self._name = name
        self.rlock = RLock()
        self.inside = False  # changed and read by who has the lock

    def __enter__(self) -> None:
        """Raises RuntimeError when this thread is inside already."""
        self.rlock.acquire()
        if self.inside:
            self.refuse()
        self.inside = True

    def __exit__(self, *error: object) -> None:
        self.inside = False
        self.rlock.release()

    def refuse(self) -> None:
        """Let go of a lock that this thread is inside of already, and raise."""
        self.rlock.release()
        raise RuntimeError(
            f"{self._name}: called from a finaliser or signal handler that interrupted the arena itself; "
            "only release may be called there"
        )
