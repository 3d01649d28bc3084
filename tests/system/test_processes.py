"""What this process may take of the machine."""

import resource

import psutil
import pytest

from evorl.system.processes import check_room, free_memory
from evorl.types.outcomes import UserError


def test_memory_is_bounded_by_the_limit_of_address_space():
    """`ulimit -v`, as some clusters set it."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = psutil.Process().memory_info().vms
    try:
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2**27, limits[1]))
        assert free_memory() <= 2**27
        with pytest.raises(UserError, match=r"replay\.capacity: .* GiB do not fit into 0\.1 GiB of free memory"):
            check_room(2**30, "replay.capacity", copies=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
