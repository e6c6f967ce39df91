import json
from pathlib import Path

import pandas as pd
import pytest

from benchmark import dynamics, pictures


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
    agrees, all_of = map(float, same.split("|")[3].split(" of "))
    assert (
        agrees > 0.9 * all_of and float(other.split("|")[3].split(" of ")[0]) <= agrees - 4
    )  # of 5 blocks to update 24
    rows = [line for line in text.split("### value_loss")[1].split("###")[0].splitlines() if line.startswith("| **")]
    assert sorted(line.count("(!)") for line in rows) == [0, 5]  # it ends in the sixth block
    assert (tmp_path / "out" / "dynamics_chaser.png").stat().st_size > 10_000


def test_agreement_is_fifteen_percent_or_half_the_range():
    own = pd.Series([1.14, 1.16, 1.16, 1.4])
    runs = pd.DataFrame([[1.0, 1, 1], [1.0, 1, 1], [0.84, 1, 1.16], [0.7, 1, 1.3]])
    assert (dynamics.deviation(own, runs) <= 1).tolist() == [True, False, True, False]


def test_a_run_of_ours_and_a_published_one_are_counted_alike(published):
    """The same run agrees with two others as often, whether it is ours or published."""
    blocks = [dynamics.block_means(table) for table in published]
    pairs = [dynamics.agreement(blocks[0], [blocks[i], blocks[j]]) for i, j in ((0, 1), (0, 2), (1, 2))]
    mean, number = dynamics.agreement(blocks[0], blocks)
    assert mean == pytest.approx(sum(count for count, _ in pairs) / 3) and pairs[0][1] == number
    assert min(pairs[0][0], pairs[1][0]) > pairs[2][0]  # one of the two is the run itself


def test_half_a_last_line_is_left_out_and_two_folders_of_one_name_both_count(tmp_path, published):
    for parent in "ab":
        write_run(tmp_path / "runs" / parent / "r", "chaser", published[0].loc[:30])
    with open(tmp_path / "runs" / "a" / "r" / "metrics.csv", "a") as file:
        file.write("3")
    text = page(tmp_path)
    assert f"{tmp_path / 'runs' / 'a' / 'r'}: the last line of metrics.csv is incomplete" in text
    assert text.count("| chaser | r |") == 1 and f"| chaser | {tmp_path / 'runs' / 'b' / 'r'} |" in text


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


def test_the_picture_begins_value_loss_at_update_2_and_numbers_each_column(published):
    runs = {"ppo_chaser_1": published[0].loc[:30], "x": published[1].loc[:20]}
    fig = dynamics.draw(runs, dynamics.load_published("chaser"), dynamics.looks({"chaser": runs})["chaser"])
    axes = {ax.get_title(): ax for ax in fig.axes}
    assert len(axes) == 7
    assert axes["value_loss from update 2"].lines[0].get_xdata().tolist() == list(range(2, 31))
    assert axes["policy_entropy"].lines[0].get_xdata().tolist() == list(range(1, 31))
    numbered = [ax.xaxis.get_tick_params()["labelbottom"] for ax in fig.axes]
    assert numbered == [False] * 3 + [True] * 4  # the fourth column has one panel
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["published, 3 runs", *runs]


def test_an_algorithm_has_one_colour_on_all_games_and_its_runs_have_lines_of_their_own():
    names = {
        "chaser": ["ppo_chaser_2_torch_adam"],
        "maze": ["ppo_maze_1", "ppo_maze_2", "maze__ppo_procgen__3"],
    }
    names["maze"] += ["ppo_maze_1_torch_adam", "ppo_maze_1_torch_pooling"]
    looks = dynamics.looks({game: dict.fromkeys(runs) for game, runs in names.items()})
    colours = {run: look["color"] for runs in looks.values() for run, look in runs.items()}
    assert {colours[run] for run in names["maze"][:3]} == {pictures.COLOURS["ppo_procgen"]}
    assert colours["ppo_chaser_2_torch_adam"] == colours["ppo_maze_1_torch_adam"]
    assert len(set(colours.values())) == 3
    assert len({str(looks["maze"][run]["linestyle"]) for run in names["maze"][:3]}) == 3


def test_a_run_of_one_update_is_in_the_tables_and_not_in_the_picture(tmp_path, published):
    write_run(tmp_path / "runs" / "short", "chaser", published[0].loc[:1])
    text = page(tmp_path)
    assert "Not drawn, as it has one update only: short." in text and "| **short** |" in text
    assert "![chaser]" not in text and not list((tmp_path / "out").glob("*.png"))
    write_run(tmp_path / "runs" / "long", "chaser", published[0].loc[:9])
    assert "![chaser]" in page(tmp_path)
