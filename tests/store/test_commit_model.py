"""Every reachable state of the protocol's model is right, with two operators, two attempts and three ranks.

The same search finds what goes wrong when a rule is left out.
"""

import pytest
from commit_model import explore


@pytest.mark.slow
def test_every_reachable_state_keeps_the_invariants() -> None:
    result = explore()
    assert result.wrong == "", "\n".join((result.wrong, *result.trace))
    assert result.states > 100_000
    assert result.committed == {1, 2}, "commits of both attempts are reached"
    print(f"{result.states} states, all right")


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("R1", "lacks a shard"),
        ("R2", "stands twice"),
        ("R3", "lacks a shard"),
        ("R4", "after the fence"),
        ("R5", "commits after the fence"),
        ("R9", "stands twice"),
        ("R12", "lacks a shard"),
    ],
)
def test_without_a_rule_the_search_finds_a_violation(rule: str, wrong: str) -> None:
    result = explore(frozenset({rule}))
    assert wrong in result.wrong
    assert result.trace, "a shortest way there is shown"
