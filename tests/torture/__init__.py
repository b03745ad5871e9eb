"""Random storms: prompts and decoders publish, pull, link and restart while they are killed and stopped at random times.

`python -m torture --help` (with tests/ on the path) says how to start one; `make torture` does.

  arguments   what a run is asked for
  board       counters and hints that all processes of a run see, and that outlive a killed one
  clock       the time, and for how much of it a worker could not run
  shelves     which caches a prompt has and what their rows are called
  pattern     the bytes: which key, generation, tensor and place they belong to
  worker      what prompts and decoders have in common: a life, calls with a deadline, faults, leaks
  prompt      fills, publishes, takes back, frees
  decoder     links, pulls, judges every answer and every byte (`pulls`, `destination`, `halves`), waits (`streams`), lends
              (`loans`), is pushed to (`landings`, by a prompt's `parcels`)
  zygote      a started process that has imported everything and forks the next life of a killed one
  processes   start, stop, kill and reap one process
  locks       who holds which link, read from outside
  referee     kills and stops at random times, looks for hangs, counts
  report      what is printed, and whether it was right
  seeded      bugs that a storm must find
"""
