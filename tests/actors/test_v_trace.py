"""V-trace, held against the sums of its paper."""

import pytest
import torch

from evorl.algorithms.functional import v_trace

T, P, B = 7, 2, 3


def numbers(seed=0):
    """Random steps [T, P, B] of which some end an episode, and hyperparameters [P]."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(T, P, B, generator=generator, dtype=torch.float64)

    terminated = torch.rand(T, P, B, generator=generator) < 0.15
    truncated = (torch.rand(T, P, B, generator=generator) < 0.15) & ~terminated
    value = normal()
    # What follows a truncated step, or the last one, is another state than the next step's.
    next_value = torch.where(truncated, normal(), value.roll(-1, 0))
    next_value[-1] = normal()[-1]
    given = {"reward": normal(), "value": value, "next_value": next_value, "terminated": terminated}
    return given | {"ended": terminated | truncated}, 0.5 * normal(), torch.tensor([0.9, 0.99], dtype=torch.float64)


def by_the_paper(log_ratio, reward, value, next_value, terminated, ended, discount, trace):
    """Equation 1 for one step after the other: sums of errors, each by the product of all traces before it.

    Advantages bootstrap from the target of the next state and its value, in the proportions trace and 1 - trace.
    """
    target, advantage = torch.zeros_like(value), torch.zeros_like(value)
    for p in range(P):
        for b in range(B):

            def rho(t, p=p, b=b):
                return min(float(log_ratio[t, p, b].exp()), 1.0)

            def follows(t, p=p, b=b):
                return 0.0 if terminated[t, p, b] else float(next_value[t, p, b])

            for s in range(T):
                total, product = float(value[s, p, b]), 1.0
                for t in range(s, T):
                    error = float(reward[t, p, b]) + float(discount[p]) * follows(t) - float(value[t, p, b])
                    total += product * rho(t) * error
                    if ended[t, p, b]:
                        break
                    product *= float(discount[p]) * float(trace[p]) * rho(t)
                target[s, p, b] = total
            for s in range(T):
                after, share = follows(s), float(trace[p])
                if s < T - 1 and not ended[s, p, b]:
                    after = share * float(target[s + 1, p, b]) + (1 - share) * after
                gained = float(reward[s, p, b]) + float(discount[p]) * after - float(value[s, p, b])
                advantage[s, p, b] = rho(s) * gained
    return target, advantage


@pytest.mark.parametrize("trace", [1.0, 0.9, 0.0])
def test_v_trace_equals_the_sums_of_the_paper(trace):
    given, log_ratio, discount = numbers()
    traces = torch.full((P,), trace, dtype=torch.float64)
    found = v_trace(log_ratio, *given.values(), discount, traces)
    expected = by_the_paper(log_ratio, *given.values(), discount, traces)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
