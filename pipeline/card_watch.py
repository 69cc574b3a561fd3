"""What a sampler makes of one card's memory: its minimum, falls below a floor, and counters that stand still."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from rocline.pipeline.sysfs_cards import CardMemory, Sensors

GIB = 1 << 30
HIP_S = 1.0  # between two questions to HIP while sysfs shows no change
SENSORS_S = 1.0  # between two looks at them: the card's firmware has to answer
COARSE_S = 5.0
REST_S = 1.0  # above the floor, until the next fall below it is another
STILL_READINGS = 30  # of the sensors, the same again
MOVED_BYTES, DISAGREE_S = 64 << 20, 5.0
HIGHS = ("power_w", "junction_c", "memory_c")
Answer = TypeVar("Answer")
NO_SENSORS = Sensors(None, None, None, None, None, None, None, None, None)


class Watched(Protocol):
    """A card, as sysfs_cards.Card."""

    pci_id: str
    name: str

    def memory(self) -> CardMemory: ...
    def sensors(self) -> Sensors: ...


class HipWord(Generic[Answer]):
    """What HIP says of a card whose memory in use sysfs tells, which costs less to ask.

    HIP is asked where the memory in use has moved, at the look after that, and HIP_S after the last time. In between
    its last answer stands, which was given for the same memory in use: no fall or rise that sysfs shows waits for a
    newer one. What HIP alone sees is seen HIP_S later at most, or not at all if it is over by then.
    """

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self._ask = ask
        self.due_s = 0.0  # asked then, if not before
        self._used_bytes = -1  # when HIP was asked last
        self._answer: Answer

    def at(self, at_s: float, used_bytes: int, anew: bool = False) -> Answer:
        """What HIP says. at_s never goes back; used_bytes: as sysfs says now. Raises what asking raises."""
        moved = used_bytes != self._used_bytes
        if moved or anew or at_s >= self.due_s:
            self._used_bytes = -1  # asked again at the next look where this one fails
            self._answer = self._ask()
            self._used_bytes, self.due_s = used_bytes, at_s if moved else at_s + HIP_S
        return self._answer


class Look(NamedTuple):
    """What one look at a card found.

    free_bytes      the less of what sysfs and HIP say; None where the card could not be read, and `error` says why
    hip_free_bytes  as of when it was asked last, see HipWord; None where it is not, or did not answer
    sensors         as of the last time they were read, about SENSORS_S ago at most
    frozen          whether its counters stand still, though they must not
    """

    free_bytes: int | None
    used_bytes: int | None
    total_bytes: int | None
    hip_free_bytes: int | None
    sensors: Sensors
    frozen: bool
    error: str


NOTHING = Look(None, None, None, None, NO_SENSORS, False, "")


class Least(NamedTuple):
    free_bytes: int
    at_s: float


class CardWatch:
    """Looks at one card, and keeps what is worth telling at the end.

    alarm         called at once with a line for people: the card is below the floor, cannot be read, stands still
    hip_free      bytes; may raise whatever it likes
    least         of all looks; None before the first that succeeded
    coarse_least  of those that a sampler would have had that looks every COARSE_S
    sensors       when they were last read
    highs         the most that figures of HIGHS were
    throttled     readings of the sensors by the reasons they gave
    """

    def __init__(
        self,
        card: Watched,
        floor_bytes: int,
        alarm: Callable[[str], None],
        hip_free: Callable[[], int] | None = None,
    ) -> None:
        self.card, self.floor_bytes = card, floor_bytes
        self.least: Least | None = None
        self.coarse_least: Least | None = None
        self.n_looks = self.n_failed = self.n_below = self.n_frozen = self.total_bytes = 0
        self.sensors = NO_SENSORS
        self.highs: dict[str, float] = {}
        self.throttled: Counter[str] = Counter()
        self._alarm, self._hip = alarm, HipWord(hip_free) if hip_free else None
        self._sensors_due_s = self._coarse_due_s = 0.0
        self._is_below, self._below_s = False, 0.0
        self._still = _Still()
        self._was_lost = self._was_frozen = False
        self._last, self._due_s = NOTHING, 0.0

    @property
    def has_failed(self) -> bool:
        """Whether anything was there that an alarm told of."""
        return bool(self.n_below or self.n_failed or self.n_frozen)

    def look(self, at_s: float) -> Look:
        """Look now, at_s seconds after the first look, which never goes back.

        Most looks find nothing new. They cost little, and give the last one's own object again.
        """
        self.n_looks += 1
        try:
            used_bytes, total_bytes = self.card.memory()
        except OSError as error:
            self._last, self._due_s = self._lost(f"{error.strerror} ({error.filename})"), at_s
            return self._last
        if used_bytes != self._last.used_bytes or at_s >= self._due_s:
            self._last = self._take(at_s, used_bytes, total_bytes)
            self._due_s = self._next_s(at_s, self._last)
        return self._last

    def _take(self, at_s: float, used_bytes: int, total_bytes: int) -> Look:
        self._was_lost = False
        hip_free_bytes = self._hip_free(at_s, used_bytes)
        free_bytes = total_bytes - used_bytes
        free_bytes = free_bytes if hip_free_bytes is None else min(free_bytes, hip_free_bytes)
        self.total_bytes = total_bytes
        self._measure(at_s, free_bytes)
        if at_s >= self._sensors_due_s:
            self._sensors_due_s = at_s + SENSORS_S
            self._read_sensors(used_bytes)
        frozen = self._check_frozen(at_s, used_bytes, hip_free_bytes)
        return Look(free_bytes, used_bytes, total_bytes, hip_free_bytes, self.sensors, frozen, "")

    def _next_s(self, at_s: float, look: Look) -> float:
        """From when on a look matters that finds the same memory in use."""
        if look.frozen or self._still.is_apart or self._is_below or (self._hip and look.hip_free_bytes is None):
            return at_s
        hip_due_s = self._hip.due_s if self._hip else math.inf
        return min(self._sensors_due_s, self._coarse_due_s, hip_due_s)

    def _hip_free(self, at_s: float, used_bytes: int) -> int | None:
        try:
            return self._hip.at(at_s, used_bytes, anew=self._still.is_apart) if self._hip else None
        except Exception:  # sysfs goes on without it
            return None

    def _lost(self, why: str) -> Look:
        self.n_failed += 1
        if not self._was_lost:
            self._was_lost = True
            self._alarm(f"{self.card.pci_id} cannot be read: {why}; see the kernel's log")
        return NOTHING._replace(error=why)

    def _measure(self, at_s: float, free_bytes: int) -> None:
        if self.least is None or free_bytes < self.least.free_bytes:
            self.least = Least(free_bytes, at_s)
        if at_s >= self._coarse_due_s:
            self._coarse_due_s += COARSE_S * ((at_s - self._coarse_due_s) // COARSE_S + 1)
            if self.coarse_least is None or free_bytes < self.coarse_least.free_bytes:
                self.coarse_least = Least(free_bytes, at_s)
        self._check_floor(at_s, free_bytes)

    def _check_floor(self, at_s: float, free_bytes: int) -> None:
        if free_bytes >= self.floor_bytes:
            self._is_below = self._is_below and at_s < self._below_s + REST_S
            return
        if not self._is_below:
            self._alarm(
                f"{self.card.pci_id} has {free_bytes / GIB:.2f} GiB free, the floor is {self.floor_bytes / GIB:.2f}; "
                "lower --chunk-rows or --kv-tokens, or end what else uses the card"
            )
        self.n_below += 1
        self._is_below, self._below_s = True, at_s

    def _read_sensors(self, used_bytes: int) -> None:
        sensors = self.sensors = self.card.sensors()
        for name in HIGHS:
            if (value := getattr(sensors, name)) is not None:
                self.highs[name] = max(value, self.highs.get(name, value))
        if sensors.throttle not in (None, "none"):
            self.throttled[sensors.throttle] += 1
        self._still.saw_sensors(used_bytes, sensors)

    def _check_frozen(self, at_s: float, used_bytes: int, hip_free_bytes: int | None) -> bool:
        self._still.saw_memory(at_s, used_bytes, hip_free_bytes)
        why = self._still.verdict(at_s)
        self.n_frozen += bool(why)
        if why and not self._was_frozen:
            self._alarm(f"{self.card.pci_id}: its counters stand still, {why}; its figures mean nothing")
        self._was_frozen = bool(why)
        return bool(why)


class _Still:
    """Whether a card's counters are frozen.

    Memory in use alone does not tell: a server that allocates nothing leaves it the same for days. They are frozen if

    - everything is the same to the last digit, memory, load, power, temperatures and clocks, in STILL_READINGS
      readings of the sensors, while the load is not 0: a card at work changes its power or its clock all the time; or
    - what HIP calls free has been seen for DISAGREE_S to be more than MOVED_BYTES away from what it was when sysfs's
      memory in use last moved.

    is_apart  whether it was so far away last time: from then on every look must ask HIP anew
    """

    def __init__(self) -> None:
        self.is_apart = False
        self._figures: tuple[object, ...] = ()
        self._n_same = 0
        self._used_bytes = -1
        self._hip_bytes: int | None = None  # once used_bytes had settled
        self._apart_s = 0.0

    def saw_sensors(self, used_bytes: int, sensors: Sensors) -> None:
        moving = (sensors.power_w, sensors.sclk_mhz)
        figures = (used_bytes, sensors.busy_percent, *moving, sensors.junction_c, sensors.memory_c, sensors.mclk_mhz)
        tells = bool(sensors.busy_percent) and None not in moving
        self._n_same = self._n_same + 1 if tells and figures == self._figures else 0
        self._figures = figures

    def saw_memory(self, at_s: float, used_bytes: int, hip_free_bytes: int | None) -> None:
        was_apart = self.is_apart
        if used_bytes != self._used_bytes:
            self._used_bytes, self._hip_bytes, self.is_apart = used_bytes, None, False
        elif hip_free_bytes is None or self._hip_bytes is None:
            self._hip_bytes, self.is_apart = hip_free_bytes, False
        else:
            self.is_apart = abs(hip_free_bytes - self._hip_bytes) > MOVED_BYTES
        if self.is_apart and not was_apart:
            self._apart_s = at_s

    def verdict(self, at_s: float) -> str:
        """Why they are; empty if they are not."""
        if self._n_same >= STILL_READINGS:
            return f"at {self._figures[1]:g} % load nothing at all has changed in {self._n_same} readings"
        if self.is_apart and at_s - self._apart_s >= DISAGREE_S:
            return "HIP's free memory moves and the driver's memory in use does not"
        return ""
