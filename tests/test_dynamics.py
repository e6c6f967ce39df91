import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
from benchmark import dynamics  # noqa: E402


def write_run(folder: Path, game: str, updates: pd.DataFrame, **args) -> None:
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"args": {"env_id": game} | args}))
    updates.rename(columns=dynamics.QUANTITIES).rename_axis("iteration").to_csv(folder / "metrics.csv")


@pytest.fixture
def published():
    return list(dynamics.load_published("chaser").values())


def page(tmp_path) -> str:
    dynamics.main(dynamics.Args((tmp_path / "runs",), tmp_path / "out"))
    return (tmp_path / "out" / "dynamics.md").read_text()


def test_a_run_like_the_published_ones_agrees_and_one_unlike_them_is_marked(tmp_path, published):
    mean = sum(published) / 3
    write_run(tmp_path / "runs" / "same", "chaser", mean)
    write_run(tmp_path / "runs" / "other", "chaser", mean.assign(value_loss=2 * mean.value_loss).loc[:30])
    text = page(tmp_path)
    (same,) = [line for line in text.splitlines() if line.startswith("| chaser | same |")]
    (other,) = [line for line in text.splitlines() if line.startswith("| chaser | other |")]
    all_of = int(same.split("|")[3].split(" of ")[1])
    assert f" {all_of} of {all_of} " in same and f" {all_of - 5} of {all_of} " in other  # five blocks up to update 24
    rows = [line for line in text.split("### value_loss")[1].split("###")[0].splitlines() if line.startswith("| **")]
    assert sorted(line.count("(!)") for line in rows) == [0, 5]  # it ends in the sixth block
    assert (tmp_path / "out" / "dynamics_chaser.png").stat().st_size > 10_000


def test_agreement_is_fifteen_percent_or_half_the_range():
    own = pd.Series([1.14, 1.16, 1.16, 1.4])
    runs = pd.DataFrame([[1.0, 1, 1], [1.0, 1, 1], [0.84, 1, 1.16], [0.7, 1, 1.3]])
    assert (dynamics.deviation(own, runs) <= 1).tolist() == [True, False, True, False]


def test_what_cannot_be_compared_becomes_a_note(tmp_path, published):
    write_run(tmp_path / "runs" / "fine", "chaser", published[0].loc[:30])
    write_run(tmp_path / "runs" / "foreign", "tetris", published[0].loc[:30])
    write_run(tmp_path / "runs" / "one_level", "chaser", published[0].loc[:30], num_levels=1)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "args.json").write_text("{")
    text = page(tmp_path)
    assert (
        "tetris: no published updates" in text
        and "broken: left out" in text
        and "one_level: left out" in text
        and "## tetris" not in text
    )
