"""The script that tabulates heads on MPEv2."""

import mpev2_table


def row(head, critic, seed, mean, domain="0"):
    values = ("tag", head, critic, str(seed), domain, "256", str(mean), "1.4")
    return dict(zip(mpev2_table.COLUMNS, values, strict=True))


def test_the_table_has_intervals_over_seeds_or_else_over_episodes():
    rows = [
        row("random", "", 0, -9.6),
        *(row("ada", "set", seed, mean) for seed, mean in enumerate((10, 20, 30))),
        row("random", "", 0, -4.0, domain="1"),
    ]
    # scipy.stats.t.interval(0.95, 2, 20, 10 / 3**0.5) is 20 ± 24.84.
    assert mpev2_table.table(rows).splitlines() == [
        "| task | domain | random | ada, set |",
        "| --- | --- | --- | --- |",
        "| tag | 0 | -10 ± 1 | 20 ± 25 |",
        "| tag | 1 | -4 ± 1 |  |",
    ]
