"""What a study with so many seeds could find out."""

import math


def smallest_difference(seeds: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """Difference of two means that a two-sided t test finds with the given power.

    The test is Student's for two samples of the same size and variance. Under a
    difference d, in standard deviations, its statistic is noncentral t with
    2 (n - 1) degrees of freedom and noncentrality d sqrt(n / 2). Source: Cohen (1988),
    Statistical Power Analysis for the Behavioral Sciences, section 2.

    Args:
        seeds: n, runs of each of the two.
        alpha: probability of finding a difference where there is none, in (0, 1).
        power: probability of finding this one, in (alpha, 1).

    Returns:
        d, in standard deviations between seeds; infinite below two seeds.
    """
    from scipy import optimize, stats

    if seeds < 2:
        return math.inf
    freedom = 2 * (seeds - 1)
    critical = stats.t.isf(alpha / 2, freedom)

    def lacking(noncentrality: float) -> float:
        found = stats.nct(freedom, noncentrality)
        return float(found.sf(critical) + found.cdf(-critical)) - power

    # A noncentrality far above the critical value is found almost always.
    high = critical
    while lacking(high) < 0:
        high *= 2
    noncentrality: float = optimize.brentq(lacking, 0.0, high, xtol=1e-9)
    return noncentrality / math.sqrt(seeds / 2)
