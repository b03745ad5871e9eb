"""What all processes of a run see: one anonymous file, mapped by each of them, so that counts outlive a killed process.

Every number has one writer at a time, a 64-bit store each. Hints (which generation was published, which cache is offered) may be
old by the time they are used; the rules in `pulls` allow for that.
"""
from __future__ import annotations

import mmap
import os
from enum import IntEnum, auto

import numpy as np
import numpy.typing as npt

from torture.arguments import Plan
from torture.shelves import LANES, PARCELS, slots

Numbers = npt.NDArray[np.int64]
SAMPLES = 1 << 15


class Field(IntEnum):
    """Of one worker; its own writes unless it says referee."""

    LIFE = 0                # which life of the cluster id this is; referee at a start, the worker at a restart of its own
    READY = auto()          # the life that has initialised its cluster
    LEAVING = auto()        # the last life that has called finalize
    KILLED = auto()         # referee: the last life that was killed
    KILLED_NS = auto()      # referee: when
    INCARNATION = auto()
    CALL_NS = auto()        # when the call began in which it is, 0 = in none
    CALL = auto()           # which one
    WANTED = auto()         # referee: Wanted
    PULLS = auto()          # pulls whose bytes were checked
    NBYTES = auto()         # bytes checked
    MISSES = auto()         # pulls answered "not there"
    UNTOUCHED = auto()      # failed pulls whose destination was compared with what it held before
    LOST = auto()           # links that ended because the peer did
    CUT = auto()            # links that the peer removed
    LINKS = auto()
    PUBLISHED = auto()      # rows and caches published
    REFUSED = auto()        # allocations that found no memory
    RESTARTS = auto()       # finalize and init again, in the same process
    FAULTS = auto()
    FDS = auto()            # descriptors more than before, after the end
    MAPS = auto()           # mappings of the namespace after the end
    MAP_NBYTES = auto()
    CACHES = auto()         # caches that are still recorded after all were freed
    LOOKS = auto()          # views and forks that were looked at
    PUSHES = auto()         # pushes that were done and whose bytes were checked
    PUSHED_NBYTES = auto()
    PUSHED_BY_KEY = auto()  # pushes to a cache that a key named, done, as the prompt was told
    WAITED = auto()         # checked pulls that could wait
    LAYERED = auto()        # of these, layer by layer
    OVERDUE = auto()        # pulls that waited in vain, as they could
    PARTS = auto()          # pushes that were not done, with the row looked at word by word
    CUTS_SEEN = auto()      # looks at memory that was allocated after a link was cut in the middle of a push
    UNDONE = auto()         # pushes that were not done, as the prompt was told
    STOPPED_NS = auto()     # referee: for how long it was stopped; while it is, less the time at which that began
    ENDED = auto()          # it has ended by itself and these numbers hold


class Wanted(IntEnum):
    """What a worker is to do."""

    RUN = 0
    END = 1


class Sample(IntEnum):
    """Durations in ns that a decoder measured."""

    STATUS = 0              # from a peer's death, or from the call if that began later, to the answer that told it
    AGAIN = 1               # from a peer's death to the first right pull from its next life
    STATUS_RUNNING = 2      # as STATUS, less the time for which the decoder was stopped or waited for a processor


class Board:
    """The arrays over the file `fd`."""

    def __init__(self, fd: int, plan: Plan) -> None:
        self.fd = fd
        slot_count = slots(plan.decoders)
        invitations = (plan.prompts, plan.decoders, len(PARCELS))
        shapes = {
            "fields": (plan.workers, len(Field)),
            "published": (plan.prompts, slot_count),            # last generation published under a key
            "filling": (plan.prompts, slot_count),              # last generation that was begun
            "lanes": (plan.prompts, LANES),                     # cache id that is offered, 0 = none
            "torn": (plan.prompts, LANES),                      # last cache id of the lane whose keys were taken away
            "unlinks": (plan.prompts, plan.decoders),           # twice for each removal of a decoder's link by the prompt
            "forced": (plan.prompts, plan.decoders),            # removals by force
            "stalled": (plan.prompts, plan.decoders),           # ns for which a decoder could not run, when the prompt was killed
            "addresses": invitations,                           # where a prompt may push to now, 0 = nowhere
            "steps": invitations,                               # bytes from tensor to tensor there
            "landings": invitations,                            # the cache's id and, in the last 8 bits, the row
            "invited": invitations,                             # count of the invitation
            "unlinks_then": invitations,                        # `unlinks` when the link was made
            "lives_then": invitations,                          # the prompt's life that is invited
            "begun": invitations,                               # count of the last push that was begun
            "stamps": invitations,                              # and its stamp
            "ended": invitations,                               # count of the last push that ended; negative: not done
            "counts": (plan.workers, len(Sample)),
            "samples": (plan.workers, len(Sample), SAMPLES),
        }
        nbytes = 8 * sum(int(np.prod(shape)) for shape in shapes.values())
        if os.fstat(fd).st_size != nbytes:
            os.ftruncate(fd, nbytes)
        memory = np.frombuffer(mmap.mmap(fd, nbytes), np.int64)
        at = 0
        for name, shape in shapes.items():
            count = int(np.prod(shape))
            setattr(self, name, memory[at:at + count].reshape(shape))
            at += count

    fields: Numbers
    published: Numbers
    filling: Numbers
    lanes: Numbers
    torn: Numbers
    unlinks: Numbers
    forced: Numbers
    stalled: Numbers
    addresses: Numbers
    steps: Numbers
    landings: Numbers
    invited: Numbers
    unlinks_then: Numbers
    lives_then: Numbers
    begun: Numbers
    stamps: Numbers
    ended: Numbers
    counts: Numbers
    samples: Numbers

    @classmethod
    def make(cls, plan: Plan) -> Board:
        """A new one; its descriptor can be inherited."""
        fd = os.memfd_create("torture")
        os.set_inheritable(fd, True)
        return cls(fd, plan)

    def sample(self, worker: int, kind: Sample, nanoseconds: int) -> None:
        count = int(self.counts[worker, kind])
        self.samples[worker, kind, count % SAMPLES] = nanoseconds
        self.counts[worker, kind] = count + 1

    def all_samples(self, kind: Sample) -> list[int]:
        """Of all workers, the last SAMPLES of each."""
        found: list[int] = []
        for worker, count in enumerate(self.counts[:, kind]):
            found += self.samples[worker, kind, :min(int(count), SAMPLES)].tolist()
        return found

    def total(self, field: Field) -> int:
        return int(self.fields[:, field].sum())

    def stopped_ns(self, worker: int, now: int) -> int:
        """For how long this life of a worker was stopped, until now."""
        stopped = int(self.fields[worker, Field.STOPPED_NS])
        return stopped + now if stopped < 0 else stopped

    def is_over(self, worker: int, life: int) -> bool:
        """Was this life killed or has it begun to finalize?"""
        row = self.fields[worker]
        return bool(max(row[Field.KILLED], row[Field.LEAVING]) >= life)
