"""How soon a block will be used again, learned from how soon such blocks were: the index by which blocks are compared.

Ages are in bytes stored meanwhile, so that a quiet night ages nothing. Blocks are classed by their number of uses. For
each class and age the chance of a use is estimated with the blocks that still wait (Kaplan and Meier, "Nonparametric
estimation from incomplete observations", 1958): without them a young memory believes that all blocks come back. The
index is the best chance of a use per byte and step of waiting, over all lengths of waiting: Gittins, "Bandit processes
and dynamic allocation indices" (1979), applied to the space a block takes; the hit density of Beckmann, Chen, Cidon,
"LHD: improving cache hit rate by maximizing hit density" (NSDI 2018) is its relative.

A bounded number of blocks is remembered. Where that is not enough to see each of them for several capacities, blocks
are sampled by a hash of their keys, so that the memory spans as long on a large drive as on a small one (Waldspurger,
Park, Garthwaite, Ahmad, "Efficient MRC construction with SHARDS", FAST 2015). Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CLASSES", "REMEMBERED", "ReuseModel"]

CLASSES = 8  # by uses; as many again for blocks that an application asked to retain
_BUCKETS = 44  # two for each doubling
REMEMBERED = 1 << 15  # blocks that wait for their next use; about 6 MB
_SPAN = 4  # capacities for which a block is remembered at least
_MAX_SHIFT = 20
_RENEW_AFTER = 512
_RENEW_PART = 4  # of the remembered blocks are recorded between two fits at most
_SLICE = 512  # remembered blocks that one call counts; the table's lock is held meanwhile
_DROPPED = 64  # keys that one call removes after the sample became smaller
_HALVE_AFTER = 1 << 20  # so that last week's habits fade
_PRIOR = 50.0  # blocks that the estimate of all classes counts for in one class
_FIRST_PRIOR = 20.0  # blocks that the assumption counts for in the estimate of all classes
_FIRST_HAZARD = 0.3 / _BUCKETS  # the assumption: reuse falls off as 1/age, which makes the order that of last use


def _bucket(steps: int) -> int:
    bits = steps.bit_length()
    if bits <= 1:
        return bits
    return min(2 * bits - 2 + (steps >> (bits - 2) & 1), _BUCKETS - 1)


def _start(bucket: int) -> int:
    if bucket <= 1:
        return bucket
    bits, odd = divmod(bucket + 2, 2)
    return (2 + odd) << (bits - 2)


_WIDTHS = [_start(b + 1) - _start(b) for b in range(_BUCKETS)]


def _zeros() -> list[list[float]]:
    return [[0.0] * _BUCKETS for _ in range(2 * CLASSES)]


class ReuseModel:
    """Not thread-safe. `capacity` sets the grain of ages and has the unit of `clock`: bytes.

    `remembered` bounds the memory of uses, in blocks.
    """

    def __init__(self, capacity: int, remembered: int = REMEMBERED) -> None:
        self._grain = max(1, capacity >> 11)
        self._span = _SPAN * capacity
        self._remembered = max(1, remembered)
        self._shift = 0
        self._mask = 0
        self._waiting: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._again = _zeros()
        self._never = _zeros()
        self._seen = self._renewed = self._halved = 0
        self._work: Iterator[None] | None = None  # an update of the index that is under way
        self._dropping: list[bytes] = []  # keys of which half left the sample
        self.clock = 0
        self._has_retained = False
        self._index = [self._fit(self._never[0], self._common(self._never), 0)] * (2 * CLASSES)

    @property
    def grain(self) -> int:
        """Bytes of one step of age."""
        return self._grain

    @property
    def sampled(self) -> float:
        """Share of the blocks whose uses are remembered."""
        return 1 / (1 << self._shift)

    def record(self, block_key: bytes, uses: int) -> int:
        """Record a store or a use. Returns the number of uses, at most CLASSES - 1, with those before an eviction."""
        if self._mask and crc32(block_key) & self._mask:
            return min(uses, CLASSES - 1)
        waited = self._waiting.pop(block_key, None)
        retained = 0
        if waited is not None:
            before, since = waited
            self._again[before][_bucket((self.clock - since) // self._grain)] += 1
            retained = before // CLASSES * CLASSES
            uses = max(uses, before % CLASSES + 1)
        uses = min(uses, CLASSES - 1)
        self._waiting[block_key] = (uses + retained, self.clock)
        if self._dropping:
            self._drop_unsampled()
        elif len(self._waiting) > self._remembered:
            self._make_room()
        self._seen += 1
        return uses

    def _make_room(self) -> None:
        """Forget the block that waits for longest or, if it does not wait for long, half of the blocks by hash."""
        key, (before, since) = next(iter(self._waiting.items()))
        if self.clock - since >= self._span or self._shift == _MAX_SHIFT:
            del self._waiting[key]
            self._never[before][_bucket((self.clock - since) // self._grain)] += 1
            return
        self._shift += 1
        self._mask = (1 << self._shift) - 1
        self._dropping = list(self._waiting)
        self._fade()

    def _drop_unsampled(self) -> None:
        """Forget some of the blocks that left the sample."""
        mask = self._mask
        for key in self._dropping[-_DROPPED:]:
            if crc32(key) & mask:
                self._waiting.pop(key, None)
        del self._dropping[-_DROPPED:]

    def _fade(self) -> None:
        for row in (*self._again, *self._never):
            row[:] = [n / 2 for n in row]

    def retain(self, block_key: bytes) -> None:
        """Class the block among those that an application asked to retain, until it asks otherwise or is forgotten."""
        self._has_retained = True
        if (waited := self._waiting.get(block_key)) is not None:
            self._waiting[block_key] = (waited[0] % CLASSES + CLASSES, waited[1])

    def index(self, uses: int, last: int, *, retained: bool = False) -> float:
        """Return the expected value of a block of this class last used at clock `last`; higher is kept longer."""
        return self._index[uses + CLASSES * retained][_bucket((self.clock - last) // self._grain)]

    def refit(self) -> None:
        """Continue to update the index if enough was recorded: one slice of the work, 1 to 2 milliseconds."""
        if self._work is None:
            if self._seen - self._renewed < max(_RENEW_AFTER, len(self._waiting) // _RENEW_PART):
                return
            self._work = self._renew()
        if next(self._work, self._work) is not None:
            self._work = None

    def _renew(self) -> Iterator[None]:
        """Update the index, in slices."""
        self._renewed = self._seen
        if self._seen - self._halved >= _HALVE_AFTER:
            self._halved = self._seen
            self._fade()
        left, still, grain = list(self._waiting.values()), _zeros(), self._grain
        while left:
            clock = self.clock
            for uses, since in left[-_SLICE:]:
                still[uses][_bucket((clock - since) // grain)] += 1
            del left[-_SLICE:]
            yield
        ended = [[n + w for n, w in zip(*rows, strict=True)] for rows in zip(self._never, still, strict=True)]
        common = self._common(ended)
        yield
        classes = 2 * CLASSES if self._has_retained else CLASSES  # in one slice, so that retained ones delay nothing
        found = [self._fit(ended[number], common, number) for number in range(classes)]
        self._index = found if len(found) > CLASSES else found + found

    def _common(self, ended: list[list[float]]) -> list[float]:
        """The chance of a use in each age bucket, of all classes together."""
        used = [sum(row[b] for row in self._again) for b in range(_BUCKETS)]
        exposed = _exposures(used, [sum(row[b] for row in ended) for b in range(_BUCKETS)])
        return [
            (n + _FIRST_HAZARD * _FIRST_PRIOR) / (at_risk + _FIRST_PRIOR)
            for n, at_risk in zip(used, exposed, strict=True)
        ]

    def _fit(self, ended: list[float], common: list[float], number: int) -> list[float]:
        """The index of one class by age bucket. A class of which little is known is taken to be as all together."""
        again = self._again[number]
        at_risk = _exposures(again, ended)
        return _gittins([(again[b] + common[b] * _PRIOR) / (at_risk[b] + _PRIOR) for b in range(_BUCKETS)])


def _exposures(used: list[float], ended: list[float]) -> list[float]:
    """How many blocks passed through each bucket; those whose wait was no longer seen count for half of their last."""
    alive = 0.0
    found = [0.0] * _BUCKETS
    for b in reversed(range(_BUCKETS)):
        alive += used[b] + ended[b]
        found[b] = alive - ended[b] / 2
    return found


def _gittins(hazards: list[float]) -> list[float]:
    """The index by age bucket, of the chance of a use in each bucket of a block that waited until then."""
    alive = [1.0] * (_BUCKETS + 1)
    for b in range(_BUCKETS):
        alive[b + 1] = alive[b] * (1 - hazards[b])
    hit = [alive[b] - alive[b + 1] for b in range(_BUCKETS)]
    cost = [(alive[b] + alive[b + 1]) / 2 * _WIDTHS[b] for b in range(_BUCKETS)]
    index = []
    for age in range(_BUCKETS):
        best = hits = waited = 0.0
        for b in range(age, _BUCKETS):
            hits += hit[b]
            waited += cost[b]
            if hits > best * waited:
                best = hits / waited
        index.append(best)
    return index
