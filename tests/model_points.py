"""Where a process can die, and which step of which sub-model stands for it.

The points are those of the crash matrix in `docs/reliability.md`. A step stands for a point if the model has it as a step of the
one who dies there, and lets this one die right before and right after it. "Both" and "all" need no lines: every model lets each of
its processes die at any moment, whoever died before.
"""
from __future__ import annotations

from typing import Any

from model import Model
from model_cache import HazardModel
from model_index import IndexModel
from model_leases import LeaseModel
from model_link import A, B, C, LinkModel
from model_lock import LockModel
from model_members import SWEEPER, Member, MembersModel
from model_publish import PublishModel
from model_rows import CoverageModel
from model_segments import SegmentsModel
from model_waits import WaitModel

#: The sub-models as they are explored here, by the name of their module.
MODELS: dict[str, Model[Any]] = {
    "lock": LockModel(faults=frozenset({"crashes"})),
    "link": LinkModel((A, B, C)),
    "cache": HazardModel(last=2),
    "rows": CoverageModel(),
    "members": MembersModel((Member(1), Member(2), SWEEPER)),
    "segments": SegmentsModel(),
    "publish": PublishModel(),
    "index": IndexModel(),
    "waits": WaitModel(),
    "leases": LeaseModel(forks=True),
}

#: Point -> (sub-model, who dies, the step).
POINTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "create": (("segments", "owner", "creates the name"), ("members", "0", "creates a segment"),
               ("members", "0", "creates table")),
    "fallocate": (("segments", "owner", "gets its pages (fallocate)"),),
    "header": (("segments", "owner", "writes the header"),),
    "publish": (("segments", "owner", "publishes: cache LIVE"), ("publish", "owner", "publishes: progress"),
                ("publish", "owner", "looks for waiters"), ("cache", "owner", "cache LIVE"), ("rows", "owner", "row LIVE")),
    "waiting for a publish": (("publish", "reader", "counts itself in"), ("publish", "reader", "waits"),
                              ("publish", "reader", "counts itself out")),
    "lease": (("waits", "reader", "takes a lease"), ("waits", "reader", "clears hazard"),
              ("waits", "reader", "gives the lease back"), ("leases", "A", "takes a lease"), ("leases", "A", "clears hazard"),
              ("leases", "A", "forks the segment"), ("leases", "A", "closes"), ("leases", "A", "gives its lease back")),
    "event": (("waits", "owner", "adds to the event"), ("waits", "owner", "wakes")),
    "waiting for a layer": (("waits", "reader", "counts itself in"), ("waits", "reader", "goes to sleep"),
                            ("waits", "reader", "copies a layer"), ("waits", "reader", "counts itself out")),
    "key insert": (("segments", "owner", "inserts into the index"), ("index", "owner", "inserts an entry"),
                   ("index", "owner", "removes an entry"), ("index", "owner", "switches the index word"),
                   ("index", "owner", "punches the replaced table")),
    "lock taken": (("lock", "side 0", "takes"), ("lock", "side 1", "takes"), ("lock", "side 0", "marks"),
                   ("lock", "side 0", "offers"), ("lock", "side 0", "releases"), ("lock", "side 0", "unmarks")),
    "hazard set": (("cache", "reader 0", "sets hazard"), ("segments", "reader", "sets hazard"), ("link", "B", "sets hazard")),
    "mid-copy": (("cache", "reader 0", "copies a run"), ("segments", "reader", "copies"), ("segments", "reader", "attaches")),
    "coverage": (("rows", "puller 0", "marks"),),
    "consume": (("rows", "puller 0", "consumes"), ("cache", "reader 0", "consumes"), ("rows", "owner", "consumes")),
    "retire": (("cache", "owner", "retires"), ("segments", "owner", "retires"), ("rows", "owner", "remove")),
    "recycle": (("cache", "owner", "frees"), ("cache", "owner", "writes the memory"), ("segments", "owner", "recycles the file")),
    "unlink": (("segments", "owner", "unlinks"), ("segments", "owner", "notes the serial"),
               ("members", "0", "unlinks its segment")),
    "join": (("members", "0", "takes cold byte"), ("members", "0", "records"), ("members", "0", "joined")),
    "leave": (("members", "0", "clears record"), ("members", "0", "drops life byte"), ("members", "0", "unlinks life file")),
    "sweep": (("members", "2", "sweeps a segment"), ("members", "2", "clears a record"), ("members", "2", "purges a segment")),
    "link": (("link", "C", "claims"), ("link", "C", "wipes hazards"), ("link", "C", "names itself"),
             ("link", "C", "opens its side"), ("link", "C", "goes LIVE")),
    "push": (("link", "A", "opens its side"), ("link", "A", "takes"), ("link", "A", "sets hazard"), ("link", "A", "copies"),
             ("link", "A", "clears hazard"), ("link", "A", "releases"), ("link", "A", "shuts its side")),
    "link over a dead one": (("leases", "B", "ends a dead one's link"), ("leases", "B", "clears the dead one's leases"),
                             ("leases", "B", "clears the dead one's hazard"), ("leases", "B", "starts a new serial")),
    "unlink link": (("link", "B", "unlink"), ("link", "B", "force_unlink"), ("link", "B", "closes its side")),
}
