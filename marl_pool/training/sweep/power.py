"""Statistical power of a comparison of two means."""

import math


def smallest_difference(seeds: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest difference of two means that a two-sided t test detects.

    The test is Student's for two samples of the same size and variance. Under a
    difference d, in standard deviations, its statistic is noncentral t with
    2 (n - 1) degrees of freedom and noncentrality d sqrt(n / 2).

    Source: Cohen (1988), Statistical Power Analysis for the Behavioral Sciences,
    section 2.

    Args:
        seeds: n, the size of each sample.
        alpha: probability of a false detection, in (0, 1).
        power: probability of detecting the difference, in (alpha, 1).

    Returns:
        d, in standard deviations between seeds; infinite below two seeds.
    """
    from scipy import optimize, stats

    if seeds < 2:
        return math.inf
    freedom = 2 * (seeds - 1)
    critical = stats.t.isf(alpha / 2, freedom)

    def excess_power(noncentrality: float) -> float:
        statistic = stats.nct(freedom, noncentrality)
        return float(statistic.sf(critical) + statistic.cdf(-critical)) - power

    # The power tends to 1 far above the critical value.
    high = critical
    while excess_power(high) < 0:
        high *= 2
    noncentrality: float = optimize.brentq(excess_power, 0.0, high, xtol=1e-9)
    return noncentrality / math.sqrt(seeds / 2)
