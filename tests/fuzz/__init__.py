"""A structure-aware fuzzer over the members table, directories and segment headers: `python -m fuzz` in `tests/`, or `make fuzz`.

`run` builds the extensions with sanitizers, starts `worker` in a process of its own and watches it; `worker` makes inputs (`world`:
valid tables by the owner's own code; `mutate`: fields changed with knowledge of the layout) and hands them to the paths of a
reader (`readers`) or of the owner (`owners`). `flips` makes a build in which each load of shared memory is followed by a change
of the loaded word, `live` lets a second process change fields at full speed.
"""
