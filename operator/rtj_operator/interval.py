"""How often to save wastes least: from what a save costs, how often work is lost, and how long it takes to go on. Pure.

A save is begun every I seconds and costs C seconds of training (the ranks stand while they copy, and steps are slower
while bytes are uploaded). Work is lost every M seconds on average; then what was done since the newest commit is run
again, after R seconds without training. The model is that of J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006), 303-312: losses come at random
(exponentially distributed, memoryless), also during saves and restarts. T seconds of training then take on average

    M exp(R/M) (exp(I/M) - 1) T/t        t = I - C: seconds of training from one save to the next

which is least where (1 - t/M) exp(t/M) = exp(-C/M), whatever R is. `best_interval` solves that, so that it holds for
any C and M above 0. For C much below M its solution is that of J. W. Young, "A first order approximation to the optimum
checkpoint interval", Communications of the ACM 17 (1974), 530-531: t = sqrt(2 C M); Daly's series, good for C < 2 M, is
t = sqrt(2 C M) (1 + sqrt(C/2M)/3 + C/18M) - C.

Not in the model: losses that come in bursts or at the same step again and again (the mean is then too rosy, and the
upper bound that the user gives counts), and what is lost while no node can be had.
"""

import math

PRIOR_FAILURES = 1.0
PRIOR_NODE_SECONDS = 10 * 86400.0
"""The rate of losses is Gamma distributed, and before any was seen it is as if one had been in ten days of one node: on
the safe side (clusters of GPUs report one in some hundred days of a node), and outweighed within a day by a job of
many nodes. Saving more often than needed costs little: the interval goes with the root of the rate."""
SHORTEST_SECONDS = 10.0
LONGEST_SECONDS = 3600.0
"""The bounds that hold where the user gives none."""
CHANGE = 1.2
"""An interval in use changes only when what is advised is so many times longer or shorter."""
DIFFERS = 2.0
"""An interval that the user has set is spoken of when what is advised is so many times longer or shorter."""
_HALVINGS = 100
_LARGEST_EXPONENT = 700.0


def mean_time_between_losses(failures: int, node_seconds: float, nodes: int) -> float:
    """Seconds between two losses of work of a job on `nodes` nodes (M), after `failures` in `node_seconds` of training.

    One over the mean of the Gamma posterior of the rate: any node may fail, and each stops the job. Raises ValueError
    for numbers that cannot be.
    """
    _refuse(failures=failures, node_seconds=node_seconds)
    if nodes < 1:
        raise ValueError(f"nodes is {nodes}: a job has one at least")
    return (PRIOR_NODE_SECONDS + node_seconds) / (PRIOR_FAILURES + failures) / nodes


def best_interval(cost: float, mean_time: float) -> float:
    """Seconds from the beginning of a save to that of the next (I) that waste least, for a save that costs `cost`
    seconds (C) and a loss every `mean_time` seconds (M). Raises ValueError for numbers that cannot be."""
    _refuse(cost=cost, mean_time=mean_time)
    if mean_time <= 0:
        raise ValueError(f"mean_time is {mean_time:g}: it must be above 0 s")
    share = cost / mean_time
    low, high = 0.0, 1.0  # of t/M; log(1 - x) + x falls from 0 to minus infinity
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle < 1.0 and math.log1p(-middle) + middle > -share:
            low = middle
        else:
            high = middle
    return high * mean_time + cost


def wasted_fraction(interval: float, cost: float, mean_time: float, lost_besides: float = 0.0) -> float:
    """Share of the time that saves, work run again and restarts take, 0 to 1, when a save is begun every `interval`
    seconds. `lost_besides`: seconds that every loss costs besides: the restart (R), and from stage to commit, since a
    checkpoint counts only then. Raises ValueError for numbers that cannot be."""
    _refuse(interval=interval, cost=cost, mean_time=mean_time, lost_besides=lost_besides)
    trained = interval - cost
    if trained <= 0 or mean_time <= 0 or (interval + lost_besides) / mean_time > _LARGEST_EXPONENT:
        return 1.0
    taken = mean_time * math.exp(lost_besides / mean_time) * math.expm1(interval / mean_time)
    return min(1.0, max(0.0, 1.0 - trained / taken))


def upper_bound(interval_seconds: float) -> float:
    """The longest interval that may be chosen: what the user allows to be lost, 0 where nothing is said."""
    return interval_seconds or LONGEST_SECONDS


def within(seconds: float, commit_seconds: float, longest: float) -> float:
    """`seconds`, but not less than a save takes from stage to commit (one is in flight at most) or SHORTEST_SECONDS;
    and not more than `longest`, which the user has given: it counts first."""
    return min(longest, max(seconds, commit_seconds, SHORTEST_SECONDS))


def apart(one: float, other: float, factor: float) -> bool:
    """Whether one is more than `factor` times the other."""
    return max(one, other) > factor * min(one, other)


def _refuse(**values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} is {value}: it must be a number of 0 or more")
