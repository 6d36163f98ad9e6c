"""How soon a block will be used again, learned from how soon such blocks were: the index by which blocks are compared.

Ages are in bytes stored meanwhile, so that a quiet night ages nothing. Blocks are classed by their number of uses. For
each class and age the index is the best chance of a use per byte and step of waiting, over all lengths of waiting:
Gittins, "Bandit processes and dynamic allocation indices" (1979), applied to the space a block takes; the hit density
of Beckmann, Chen, Cidon, "LHD: improving cache hit rate by maximizing hit density" (NSDI 2018) is its relative. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["CLASSES", "ReuseModel"]

CLASSES = 8  # by uses; as many again for blocks that an application asked to retain
_BUCKETS = 44  # two for each doubling
_REMEMBERED = 1 << 15  # uses that wait for the next one; about 5 MB
_RENEW_AFTER = 512
_HALVE_AFTER = 1 << 20  # so that last week's habits fade
_PRIOR = 50.0  # observations that the assumption is worth; it makes a new node's order that of last use


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


class ReuseModel:
    """Not thread-safe. `capacity` sets the grain of ages and has the unit of `clock`: bytes."""

    def __init__(self, capacity: int) -> None:
        self._grain = max(1, capacity >> 11)
        self._waiting: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._again = [[0.0] * _BUCKETS for _ in range(2 * CLASSES)]
        self._never = [[0.0] * _BUCKETS for _ in range(2 * CLASSES)]
        self._seen = 0
        self._renewed = 0
        self._halved = 0
        self.clock = 0
        self._has_retained = False
        self._index = [self._gittins(c) for c in range(CLASSES)] * 2

    @property
    def grain(self) -> int:
        """Bytes of one step of age."""
        return self._grain

    def record(self, block_key: bytes, uses: int) -> int:
        """Record a store or a use. Returns the number of uses, at most CLASSES - 1, with those before an eviction."""
        waited = self._waiting.pop(block_key, None)
        retained = 0
        if waited is not None:
            before, since = waited
            self._again[before][_bucket((self.clock - since) // self._grain)] += 1
            retained = before // CLASSES * CLASSES
            uses = max(uses, before % CLASSES + 1)
        uses = min(uses, CLASSES - 1)
        self._waiting[block_key] = (uses + retained, self.clock)
        if len(self._waiting) > _REMEMBERED:
            _, (before, since) = self._waiting.popitem(last=False)
            self._never[before][_bucket((self.clock - since) // self._grain)] += 1
        self._seen += 1
        return uses

    def retain(self, block_key: bytes) -> None:
        """Class the block among those that an application asked to retain, until it asks otherwise or is forgotten."""
        self._has_retained = True
        if (waited := self._waiting.get(block_key)) is not None:
            self._waiting[block_key] = (waited[0] % CLASSES + CLASSES, waited[1])

    def index(self, uses: int, last: int, *, retained: bool = False) -> float:
        """Return the expected value of a block of this class last used at clock `last`; higher is kept longer."""
        return self._index[uses + CLASSES * retained][_bucket((self.clock - last) // self._grain)]

    def refit(self) -> None:
        """Update the index if enough was recorded. A few milliseconds."""
        if self._seen - self._renewed < _RENEW_AFTER:
            return
        self._renewed = self._seen
        if self._seen - self._halved >= _HALVE_AFTER:
            self._halved = self._seen
            for row in (*self._again, *self._never):
                row[:] = [n / 2 for n in row]
        plain = [self._gittins(c) for c in range(CLASSES)]
        self._index = plain + ([self._gittins(c) for c in range(CLASSES, 2 * CLASSES)] if self._has_retained else plain)

    def _gittins(self, uses: int) -> list[float]:
        """The index by age bucket. The assumption: reuse falls off as 1/age and is likelier for what was used often."""
        hope = _PRIOR * (uses % CLASSES + 1) / (uses % CLASSES + 3)
        again = [n + hope / _BUCKETS for n in self._again[uses]]
        never = list(self._never[uses])
        never[-1] += _PRIOR - hope
        alive = [0.0] * (_BUCKETS + 1)  # of all observations: still waiting when the bucket begins
        for b in reversed(range(_BUCKETS)):
            alive[b] = alive[b + 1] + again[b] + never[b]
        cost = [(alive[b] + alive[b + 1]) / 2 * _WIDTHS[b] for b in range(_BUCKETS)]
        index = []
        for age in range(_BUCKETS):
            best = hits = waited = 0.0
            for b in range(age, _BUCKETS):
                hits += again[b]
                waited += cost[b]
                if hits > best * waited:
                    best = hits / waited
            index.append(best)
        return index
