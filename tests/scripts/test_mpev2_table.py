"""The script that tabulates heads on MPEv2."""

import mpev2_table
import pytest

from marl_pool.utils.errors import InputError


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


def test_settings_are_kept_from_the_first_result_on(tmp_path):
    mpev2_table.keep_settings(tmp_path, {"steps": 10})
    mpev2_table.keep_settings(tmp_path, {"steps": 20})
    header, values = (
        ",".join(mpev2_table.COLUMNS),
        ",".join(row("max", "", 0, 1).values()),
    )
    (tmp_path / mpev2_table.RESULTS).write_text(f"{header}\n{values}\n")
    with pytest.raises(InputError, match="steps: expected 20 as in the results of"):
        mpev2_table.keep_settings(tmp_path, {"steps": 30})


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "settings.json").write_text('{"editor.tabSize": 4}')
    with pytest.raises(InputError, match="--out: expected a new folder or one of"):
        mpev2_table.keep_settings(tmp_path, {"steps": 10})
