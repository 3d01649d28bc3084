"""Reports: what is computed from a run whose numbers are known, and the page, in a browser too where there is one."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from helpers.drawn import CONFIG, LIVES, write_long_run, write_run

from evorl.commands.command import run_command
from evorl.report import figures
from evorl.report.data import load
from evorl.report.page import compared, ends, page, path_rows
from evorl.report.statistics import effects, groups, interval, quantile, result_interval
from evorl.runs.reading.lineage import table
from evorl.types.outcomes import EvorlWarning, UserError

pytest.importorskip("jinja2")
pytest.importorskip("plotly")
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def run(tmp_path):
    return load(write_run(tmp_path / "runs" / "a"))


def test_the_winner_is_followed_through_its_parents_as_they_were(run):
    assert [(life.generation, life.id) for life in run.winner] == [(1, 1), (2, 2), (3, 2), (4, 4)]
    (path,) = [trace for trace in figures.returns(run)["data"] if trace["name"] == "the winner's path"]
    assert path["x"] == [100, 200, 300, 400]
    assert path["y"] == [20.0, 40.0, 43.0, 60.0]


def test_agents_that_failed_do_not_squeeze_the_others(run):
    worst = replace(run.lives[0], fitness=-3000.0)
    layout = figures.returns(replace(run, lives=[worst, *run.lives[1:]]))["layout"]
    low, high = layout["yaxis"]["range"]
    assert -100 < low < min(life.fitness for life in run.lives[1:])
    assert max(life.fitness for life in run.lives) < high < 100
    assert [note["text"] for note in layout["annotations"]] == [
        f"1 of {len(run.lives)} values, down to -3000, are below"
    ]
    assert "annotations" not in figures.returns(run)["layout"]


def test_training_returns_are_drawn_beside_fitness(run):
    figure = figures.training(run)
    (path,) = [trace for trace in figure["data"] if trace["name"] == "the winner's path"]
    assert list(zip(path["x"], path["y"], strict=True)) == [(100, 15.0), (200, 35.0), (300, 38.0), (400, 55.0)]
    (grown,) = [trace for trace in figure["data"] if trace["name"] == "architecture"]
    assert grown["y"] == [15.0, None, None], "its child finished too few episodes"
    assert "return in training 55" in path["hovertext"][-1]
    known = run.train_returns
    lives = [replace(life, fitness=known.get((life.generation, life.id))) for life in run.lives]
    same = replace(run, lives=lives, config={**CONFIG, "evaluation": {"fitness": "training"}})
    assert (figures.training(same), same.fitness_name) == (None, "mean return in training")


def test_a_short_run_has_no_cards_without_content(tmp_path, run):
    cards = ["The winner's path", "Family tree", "What mutations did"]
    begun = load(write_run(tmp_path / "short", lives=LIVES[:2], elite=1))
    assert max(figures.returns(begun)["data"][0]["marker"]["size"]) == 8, "points without a line are large enough"
    short = page([begun])
    assert not any(f"<h2>{title}</h2>" in short for title in cards)
    titles = re.findall("<h2>(.*?)</h2>", page([run]))
    assert titles == ["Fitness", *cards, "How it was made"]


def test_the_schedule_shows_what_changed_on_the_way_and_when(run):
    figure = figures.schedule(run)
    assert [figure["layout"][f"yaxis{number}"]["title"]["text"] for number in ("", "2")] == ["learning_rate", "gamma"]
    rate, _ = (trace for trace in figure["data"] if trace["mode"] == "lines")
    # Drawn with the step before each point: the value holds from the end of the generation before.
    assert rate["line"]["shape"] == "vh"
    assert list(zip(rate["x"], rate["y"], strict=True)) == [
        (0, 1e-3), (100, 1e-3), (200, 2e-3), (300, 2e-3), (400, 2e-3)
    ]  # fmt: skip


def test_a_hyperparameter_that_a_branch_has_set_is_shown(run):
    """The agents before the branch have none."""
    with_norm = {**run.lives[0].hyperparameters, "max_grad_norm": 5.0}
    lives = [replace(life, hyperparameters=with_norm) if life.generation > 2 else life for life in run.lives]
    winner = [replace(life, hyperparameters=with_norm) if life.generation > 2 else life for life in run.winner]
    figure = figures.schedule(replace(run, lives=lives, winner=winner))
    shown = {axis["title"]["text"] for name, axis in figure["layout"].items() if name.startswith("yaxis")}
    assert "max_grad_norm" in shown
    assert "max_grad_norm" in table(winner, lambda name, value: value)[0]


def test_effects_compare_children_with_their_parents_before(run):
    found = {(effect.kind, effect.target): tuple(effect.changes) for effect in effects(run)}
    assert found == {
        ("none", ""): (1.0,),  # Agents that went on as themselves are no children.
        ("hyperparameters", ""): (20.0, 17.0),
        ("hyperparameters", "learning_rate"): (20.0,),
        ("hyperparameters", "gamma"): (17.0,),
        ("architecture", ""): (-5.0,),
    }
    assert next(iter(found)) == ("none", ""), "what the others are compared with comes first"


def test_intervals_are_those_of_student():
    assert quantile(2) == 4.303
    assert quantile(20) == pytest.approx(2.086, abs=2e-3)
    assert quantile(1000) == pytest.approx(1.962, abs=1e-3)
    # By hand: the standard deviation of 1, 2, 3, 6 is 2.1602, and 3.182 * 2.1602 / sqrt(4) = 3.437.
    assert interval([1.0, 2.0, 3.0, 6.0]) == (4, 3.0, pytest.approx(-0.437, abs=1e-3), pytest.approx(6.437, abs=1e-3))
    assert interval([1.0, 2.0, 6.0]) == (3, 3.0, None, None), "too few"
    assert ends(interval([1.0, 2.0, 6.0])) == "n < 4"


def test_intervals_of_results_stay_within_their_bounds_and_have_a_width():
    assert result_interval([1.0] * 10) == (pytest.approx(0.6915, abs=1e-4), 1.0), "Clopper and Pearson's table"
    assert result_interval([0.0] * 10) == (0.0, pytest.approx(0.3085, abs=1e-4))
    assert result_interval([1.0, 1.0, 1.0, 0.5]) == (pytest.approx(0.875 - 3.182 * 0.125, abs=1e-3), 1.0)
    assert result_interval([1.0] * 3) == (0.0, 1.0), "too few"
    low, high = result_interval([0.5] * 4)
    assert (low, high) == (pytest.approx(0.1988, abs=1e-4), pytest.approx(0.8012, abs=1e-4)), "four alike tell little"


def test_seeds_are_one_group_and_other_settings_another(tmp_path):
    other = {**CONFIG, "algorithm": {"name": "dqn", "learning_rate": 5e-3}}
    made = [write_run(tmp_path / str(seed), {**CONFIG, "seed": seed}, gain=float(seed)) for seed in (1, 2, 3, 4)]
    made.append(write_run(tmp_path / "other", other, LIVES[:4]))
    seeds, alone = groups([load(path) for path in made])
    assert [len(seeds.runs), len(alone.runs)] == [4, 1]
    assert seeds.title == "dqn on CartPole-v1: algorithm.learning_rate 0.001 (4 runs)"
    assert alone.title == "other: dqn on CartPole-v1: algorithm.learning_rate 0.005"
    steps, means = seeds.curve()
    assert steps.tolist() == [100, 200, 300, 400]
    assert [mean.mean for mean in means] == [22.5, 42.5, 45.5, 62.5]
    assert means[0].high == pytest.approx(22.5 + 3.182 * (5 / 3) ** 0.5 / 2, abs=1e-3)
    assert [(row["names"], row["interval"]) for row in compared([seeds, alone])] == [
        ("1, 2, 3, 4", "60.4 to 64.6"), ("other", "n < 4")
    ]  # fmt: skip


def test_runs_of_one_seed_are_no_independent_samples(tmp_path):
    made = [
        load(write_run(tmp_path / name, {**CONFIG, "seed": seed})) for name, seed in zip("abc", (1, 2, 1), strict=True)
    ]
    with pytest.warns(EvorlWarning, match="^a, c: the same settings and the same seed, 1, so they are not 2 "):
        groups(made)
    other = {**CONFIG, "seed": 1, "algorithm": {"name": "dqn", "learning_rate": 5e-3}}
    groups([*made[:2], load(write_run(tmp_path / "other", other))])
    branch = replace(made[1], config={**made[1].config, "run": {"branch_of": "a, generation 2"}})
    alone, branched = groups([made[0], branch])
    assert (alone.runs, branched.runs) == ((made[0],), (branch,)), "it shares the generations of the run a"
    assert branched.label == "dqn on CartPole-v1: branch_of generation 2"
    sibling = replace(branch, name="d", config={**branch.config, "seed": 9})
    with pytest.warns(EvorlWarning, match="^b, d: the same settings and the same origin, a, so they are"):
        groups([branch, sibling])


def test_branches_of_several_runs_at_one_generation_are_one_group(tmp_path):
    def branch(name, origin, seed):
        config = {**CONFIG, "seed": seed, "run": {"branch_of": origin}}
        return load(write_run(tmp_path / name, config))

    made = [branch(name, f"seed, {seed}, generation 2", seed) for seed, name in enumerate("abcd", 1)]
    (group,) = groups(made)
    assert group.curve()[1][-1].low is not None, "four independent runs have an interval"
    again = [
        branch("e", "x, generation 1, then b, generation 2", 5),
        branch("f", "x, generation 1, then c, generation 2", 6),
    ]
    with pytest.warns(EvorlWarning, match="^e, f: the same settings and the same origin, x, so they are"):
        assert [len(group.runs) for group in groups([*made, *again])] == [4, 2]


def test_labels_are_distinct_and_name_settings_in_full(tmp_path):
    # Four settings differ in all files, a fifth only where an algorithm has it; two groups differ in one setting alone.
    def configured(number, algorithm, **own):
        settings = {f"setting_{letter}": value for letter, value in own.items()}
        path = write_run(tmp_path / str(number), {**CONFIG, "algorithm": {"name": algorithm}, "replay": settings})
        return load(path)

    runs = [
        configured(1, "dqn", a=1, b=1, c=1, d=1), configured(2, "dqn", a=2, b=2, c=2, d=1),
        configured(3, "dqn", a=2, b=2, c=2, d=2), configured(4, "ppo", a=2), configured(5, "a2c"),
    ]  # fmt: skip
    labels = [group.label for group in groups(runs)]
    assert len(set(labels)) == 5
    assert labels[0].startswith("dqn on CartPole-v1: replay.setting_a 1, replay.setting_d 1, ")
    assert labels[0].endswith("…"), "more settings differ than are named"
    assert labels[3:] == ["ppo on CartPole-v1", "a2c on CartPole-v1"]
    # Six groups that each change another setting are distinct by no fewer than five.
    runs = [
        configured(10 + own, "dqn", **{letter: int(own == place) for place, letter in enumerate("abcdef")})
        for own in range(6)
    ]
    assert len({group.label for group in groups(runs)}) == 6


def test_a_curve_of_the_best_goes_on_where_a_run_was_solved(tmp_path):
    short, long = write_run(tmp_path / "a", lives=LIVES[:4]), write_run(tmp_path / "b", {**CONFIG, "seed": 2})
    stopped, solved = (replace(load(short), summary={"solved": each}) for each in (False, True))
    (group,) = groups([solved, load(long)])
    steps, means = group.curve()
    assert (steps[-1], means[-1].mean) == (400, (40 + 60) / 2)
    (others,) = groups([stopped, load(long)])
    assert others.curve()[0].tolist() == [100, 200], "it may have become better"


GENERATIONS, AGENTS = 60, 8


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run that is not to be changed."""
    return write_long_run(tmp_path_factory.mktemp("long") / "a", GENERATIONS, AGENTS)


@pytest.fixture(scope="module")
def each(long_run):
    """The run with each of its agents."""
    return load(long_run)


@pytest.fixture
def _small_limits(monkeypatch):
    """Let the run be one of too many agents."""
    monkeypatch.setattr("evorl.report.data.MOST_LIVES", 100)


@pytest.fixture
def thinned(long_run, _small_limits):
    return load(long_run)


def test_of_a_long_run_some_generations_are_drawn_with_all_their_agents(thinned, each):
    drawn = sorted({life.generation for life in thinned.lives})
    assert {*drawn} >= {1, GENERATIONS, each.generations[-1].elite_generation}
    assert len(drawn) in (12, 13, 14), "60 / 5, and the first and the elite's"
    assert thinned.lives == [life for life in each.lives if life.generation in drawn]
    assert thinned.generations == each.generations
    assert thinned.count == len(each.lives) == GENERATIONS * AGENTS


def test_the_effects_and_the_winner_of_a_long_run_are_those_of_all_generations(thinned, each):
    assert thinned.winner == each.winner
    assert path_rows(thinned) == path_rows(each)
    assert thinned.changes == each.changes
    changes = {}
    for life in each.lives:
        parent = each.parents.get((life.generation, life.id))
        if parent is not None and parent.id != life.id:
            changes.setdefault(life.mutation.kind, []).append(life.fitness - parent.fitness)
    assert {kind: list(values) for (kind, target), values in thinned.changes.items() if not target} == changes


def test_a_damaged_line_of_the_lineage_is_named(long_run, tmp_path):
    run = shutil.copytree(long_run, tmp_path / "a")
    rows = (run / "lineage.jsonl").read_text().splitlines()
    rows[-1] = json.dumps(json.loads(rows[-1]) | {"mutation": 3})
    (run / "lineage.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(UserError, match=r"agent [0-9]+ in generation 60: cannot be read: .*mutation"):
        load(run)


def test_damaged_lines_of_a_run_are_left_out(long_run, tmp_path):
    run = shutil.copytree(long_run, tmp_path / "a")
    rows = (run / "metrics.jsonl").read_text().splitlines()
    rows[40] = rows[40][:100]
    (run / "metrics.jsonl").write_text("\n".join(rows) + '\n{"generation": 61, "ag')
    drawn = load(run)
    assert {life.generation for life in drawn.lives} == {*range(1, GENERATIONS + 1)} - {41}
    assert page([drawn])


class Elements(HTMLParser):
    """The elements of a page, and what they would load from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loaded = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href") or name.startswith("on")]


def test_what_a_stranger_wrote_is_shown_and_not_run(tmp_path):
    config = {**CONFIG, "environment": {"id": EVIL}, "algorithm": {"name": EVIL, EVIL: EVIL}}
    config["evolution"] = {"fitness": {EVIL: 1.0}}
    lives = [(*life[:4], EVIL, EVIL, EVIL, EVIL, life[8]) if life[4] != "initial" else life for life in LIVES]
    run = load(write_run(tmp_path / "a", config, lives, ended=EVIL))
    text = page([run, replace(run, config={**config, "seed": EVIL})])
    clean = page([load(write_run(tmp_path / str(seed), {**CONFIG, "seed": seed})) for seed in (1, 2)])
    assert Elements(text).loaded == []
    assert Elements(text).tags.count("script") == Elements(clean).tags.count("script") == 3
    assert "<img" not in text
    data = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S)[1])
    assert "<img" not in json.dumps(data), "plotly reads some elements in its texts"


def test_a_run_without_a_generation_has_nothing_to_draw(tmp_path):
    path = write_run(tmp_path / "a")
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no generation has ended yet"):
        load(path)


def test_one_run_gets_its_page_in_its_directory(tmp_path, capsys):
    path = write_run(tmp_path / "a")
    run_command(["report", str(path)])
    assert "report.html" in capsys.readouterr().out
    text = (path / "report.html").read_text()
    assert len(text) < 7e6
    assert "default-src 'none'" in text, "and nothing may be asked for"


def test_twins_are_compared_in_words_and_drawn_in_pairs(tmp_path, run):
    assert figures.pairs(run) is None
    path = write_run(tmp_path / "a")
    pairs = [{"evolved": 2.0, "control": 1.0}] * 6 + [{"evolved": None, "control": 3.0}]
    (path / "summary.json").write_text(json.dumps({"ended": "finished", "comparison": {"pairs": pairs, "episodes": 9}}))
    joined, evolved, control = figures.pairs(load(path))["data"]
    assert joined["y"] == [2.0, 1.0, None] * 6 + [None, 3.0, None]
    assert (evolved["y"], control["y"]) == ([2.0] * 6 + [None], [1.0] * 6 + [3.0])
    run_command(["report", str(path)])
    assert "<p>Evolution ended higher in 6 of 7 islands: 0.86 (0.42 to 1.00)" in (path / "report.html").read_text()
    (path / "summary.json").write_text(json.dumps({"ended": "finished", "comparison": {"pairs": 3, "episodes": 9}}))
    assert load(path).pairs == []
    pairs[3]["evolved"] = EVIL
    (path / "summary.json").write_text(json.dumps({"ended": "finished", "comparison": {"pairs": pairs, "episodes": 9}}))
    assert load(path).pairs == []


@pytest.mark.parametrize(
    ("fitness", "by", "score", "name"),
    [
        ({"return": 1.0}, "training", "mean return", "mean return"),  # Evaluated after few episodes.
        ({"return": 1.0, "info.success": 100.0}, "evaluation", "mean fitness", "mean fitness in evaluation"),
        ({"rating": 1.0}, "evaluation", "mean result", "rating (Elo)"),
    ],
)
def test_fitness_is_named_for_what_it_is(run, fitness, by, score, name):
    config = run.config | {"evolution": {"fitness": fitness}, "evaluation": {"fitness": by}}
    own = replace(run, config=config)
    assert (own.score_name, own.fitness_name) == (score, name)
    assert figures.returns(own)["layout"]["yaxis"]["title"]["text"] == name


def test_a_target_that_twins_leave_untested_is_none(run):
    assert run.target == figures.returns(run)["layout"]["shapes"][0]["y0"] == 50.0
    beside_twins = replace(run, config=run.config | {"population": {"size": 2, "islands": 8, "control": True}})
    assert beside_twins.target is None
    assert figures.returns(beside_twins)["layout"]["shapes"] == []
    assert "no target" in page([beside_twins])


def test_a_best_agent_whose_seeds_make_no_difference_is_described_so(run):
    same = " (seeds make no difference)"
    assert replace(run, summary={**run.summary, "episodes_repeat": True}).described_best == run.described_best + same
