"""The script that analyses the shift caused by dropout."""

import dropout_shift
from dropout_shift import ATTENTION, FACTORS, POOLED, SAMPLER_TOO, Condition, compare


def test_only_a_maximum_after_dropout_of_the_learner_alone_is_shifted():
    shifts = {
        (head, place): float(compare(head, Condition(place=place), 0)[0])
        for head in ("max", "avg")
        for place in (ATTENTION, POOLED, SAMPLER_TOO)
    }
    assert shifts.pop(("max", ATTENTION)) > 0.1
    assert max(map(abs, shifts.values())) < 0.05


def test_the_shift_of_a_maximum_grows_with_tokens_and_rate():
    for factor in ("tokens", "rate"):
        shifts = [float(compare("max", where, 0)[0]) for where in FACTORS[factor]]
        assert shifts == sorted(shifts)


def test_table_and_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dropout_shift, "NUM_ENVS", 2)
    monkeypatch.setattr(dropout_shift, "SEEDS", [0])
    picture = tmp_path / "shift.png"
    monkeypatch.setattr("sys.argv", ["dropout_shift.py", "--out", str(picture)])
    dropout_shift.main()
    # A title, a line, and the distinct conditions: the paper's is in every factor.
    rows = sum(map(len, FACTORS.values())) - 2
    assert len(capsys.readouterr().out.splitlines()) == 2 + rows
    assert picture.read_bytes().startswith(b"\x89PNG")
