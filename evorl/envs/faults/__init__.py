"""Faults of environments: one that raises or breaks the interface ends the run by name.

- `checks`: what the calls of an environment must return;
- `raising`: one copy of a `sync` or `async` environment that raises, and calls of all copies at once;
- `closing`: environments that raise or hang when they are closed.
"""
