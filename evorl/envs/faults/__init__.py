"""Faults of environments: one that raises begins anew, one that breaks the interface ends the run by name.

- `checks`: what the calls of an environment must return;
- `restarting`: one copy of a `sync` or `async` environment that raises;
- `recovery`: a native vector environment, a game or a worker process that raises, and the count of all faults;
- `closing`: environments that raise or hang when they are closed.
"""
