"""Runs whose hyperparameters a strategy of the user chooses, by ask and tell."""

import math
import re
import shutil
import sys
from itertools import groupby

import numpy as np
import pytest
from helpers.strategies import Climber
from helpers.support import ROOT, agent, config, cut_back, lines, train

from evorl.commands.train import resume_command
from evorl.config.fields import HyperparameterRange
from evorl.evolution.strategy import Range, Tuner
from evorl.types import EvorlWarning, Mutation, UserError

pytestmark = pytest.mark.filterwarnings("ignore:no episode ended")
RANGES = "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}, gamma: {min: 0.9, max: 0.999}}"
NAME = "helpers.strategies:Climber"
MIXED = "evolution.mutation={none: 0.3, architecture: 0.5, parameters: 0.3, hyperparameters: 1}"
SEARCH = (f"evolution.strategy={NAME}", RANGES, MIXED, "checkpoint.keep=20")
SPANS = {
    "gamma": HyperparameterRange(min=0.9, max=0.999, scale="one_minus_log"),
    "learning_rate": HyperparameterRange(min=1e-4, max=1e-2, scale="log"),
}


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the strategies and told to them."""
    monkeypatch.setattr(Climber, "calls", [])
    return Climber.calls


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A run of some ten generations, and the calls of its strategy."""
    directory = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(Climber, "calls", [])
        assert train(*SEARCH, "run.name=a", "training.max_steps=400") == 0
        return directory / "runs" / "a", list(Climber.calls)


@pytest.fixture
def run(searched, in_directory):
    return shutil.copytree(searched[0], in_directory / "runs" / "a")


def generations(run):
    rows = lines(run / "lineage.jsonl")
    return [list(group) for _, group in groupby(rows, key=lambda row: row["generation"])]


def point(row):
    return [SPANS[name].share_of(row["hyperparameters"][name]) for name in SPANS]


def test_strategy_is_told_each_generation_and_asked_for_children(searched):
    run, (made, first, *rest) = searched
    assert made[:2] == ("made", {name: Range(one.min, one.max, one.scale) for name, one in SPANS.items()})
    assert 0 <= made[2] < 2**32
    trained = generations(run)
    assert first[:2] == ("ask", 4)
    asked = [first]
    known = set()
    for place, members in enumerate(trained):
        new = [row for row in members if row["id"] not in known and row["mutation"]["kind"] in ("initial", "strategy")]
        known |= {row["id"] for row in members}
        if new:
            assert asked, "they were not asked for"
            (_, count, points), asked = asked[0], []
            assert count == len(new)
            assert [point(row) for row in new] == [pytest.approx(np.clip(each, 0, 1)) for each in points]
        assert not asked
        told, rest = rest[0], rest[1:]
        assert told == ("tell", [point(row) for row in members], [row["fitness"] for row in members])
        if rest and rest[0][0] == "ask":
            asked, rest = [rest[0]], rest[1:]
        elif place + 1 < len(trained):
            kinds = [row["mutation"]["kind"] for row in trained[place + 1] if row["id"] not in known]
            assert "strategy" not in kinds
    assert not rest


def test_resumed_strategy_chooses_as_undisturbed(run, calls, searched, recwarn):
    last = len(generations(run))
    before = lines(run / "lineage.jsonl")
    agents = (run / "checkpoints" / f"generation-{last:06d}" / "agents.safetensors").read_bytes()
    cut_back(run, 3)
    assert train(*SEARCH, "run.name=a", "run.resume=auto", "training.max_steps=400") == 0
    assert not [one for one in recwarn if issubclass(one.category, EvorlWarning)]
    assert calls == searched[1]
    assert lines(run / "lineage.jsonl") == before
    assert (run / "checkpoints" / f"generation-{last:06d}" / "agents.safetensors").read_bytes() == agents


def test_strategy_that_chooses_otherwise_on_resume_is_warned_of(in_directory):
    asked = ("evolution.strategy=helpers.strategies:Forgetful", RANGES, "run.name=a")
    assert train(*asked, "training.max_steps=80") == 0
    with pytest.warns(EvorlWarning, match="not bit-exact: evolution.strategy did not repeat its earlier choices"):
        assert train(*asked, "training.max_steps=120", "run.resume=auto") == 0


def test_strategy_is_told_minus_infinity_for_lost_agents_and_values_are_clipped(calls):
    settings = config(*SEARCH).evolution
    tuner = Tuner(settings, 2**40 + 3)
    assert calls[0][2] == 3
    members = [agent(id=0, gamma=0.9999, learning_rate=1e-3), agent(id=1, gamma=0.5, learning_rate=1e-9)]
    members[0].fitness = math.nan
    tuner.tell(members)
    assert calls[-1] == ("tell", [[1.0, pytest.approx(0.5)], [0.0, 0.0]], [-math.inf, -math.inf])
    for count in (0, 50):
        agents = [agent(id=2 + place) for place in range(count)]
        for one in agents:
            one.mutation = Mutation("strategy", NAME)
        tuner.settle(agents)
    assert [call[0] for call in calls] == ["made", "tell", "ask"], "it is not asked for nobody"
    points = np.array(calls[-1][2])
    assert (points > 1).any()
    assert max(one.hyperparameters["gamma"] for one in agents) == 0.999
    assert [point(vars(one)) for one in agents] == [pytest.approx(each) for each in points.clip(0, 1)]
    assert {one.hyperparameters["batch_size"] for one in agents} == {agent().hyperparameters["batch_size"]}


def test_a_strangers_strategy_is_run_only_with_consent(run):
    with pytest.raises(
        UserError, match=r"^evolution\.strategy: 'helpers\.strategies:Climber' names custom code to execute"
    ):
        resume_command(run, (), None, 1)
    assert resume_command(run, (), None, 1, allow_code=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Climber", "cannot import 'nowhere:Climber': No module named 'nowhere'"),
        (
            "helpers.strategies:refuses",
            r"the constructor of 'helpers.strategies:refuses': ValueError: no ranges that it likes "
            r"\(.*strategies.py:\d+ in refuses: raise ValueError",
        ),
        ("helpers.strategies:Short", r"ask of 'helpers.strategies:Short': .*it must return 4 lists of 2 finite num"),
        ("helpers.strategies:Failing", r"tell of .*: KeyError: 'mine' \(.*strategies.py:\d+ in tell: return {}"),
    ],
)
def test_a_strategy_that_fails_is_named_on_one_line_with_its_own(name, message, in_directory, capsys):
    assert train(f"evolution.strategy={name}", RANGES, "run.name=a") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"^error: evolution\.strategy: {message}", error)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("evolution.initial=[runs/x]",), "it chooses the first settings itself"),
        (("evolution.hyperparameters={}",), "there are no ranges to choose from"),
    ],
)
def test_settings_that_contradict_a_strategy_are_refused(overrides, message):
    with pytest.raises(UserError, match=rf"evolution\.strategy: {message}"):
        config(f"evolution.strategy={NAME}", *overrides)


@pytest.mark.two_process
def test_two_ranks_agree_and_go_on_alike(tmp_path, forked_launch):
    common = (*SEARCH, "training.max_steps=240", "population.placement=sharded")
    done = forked_launch(tmp_path, "run.name=a", *common)
    assert done.returncode == 0, done.stderr[-3000:]
    run, again = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    cut_back(run, 2, copy=again)
    assert "strategy" in {row["mutation"]["kind"] for row in lines(run / "lineage.jsonl")}
    done = forked_launch(tmp_path, "run.name=b", "run.resume=auto", *common)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not bit-exact" not in done.stderr
    assert lines(run / "lineage.jsonl") == lines(again / "lineage.jsonl")


def example():
    """The strategy in docs/recipes.md."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return code


def test_the_example_of_cma_es_searches_and_is_resumed(in_directory, monkeypatch, recwarn):
    pytest.importorskip("cmaes")
    (in_directory / "cma_es.py").write_text(example())
    monkeypatch.delitem(sys.modules, "cma_es", raising=False)
    monkeypatch.syspath_prepend(in_directory)
    every = "evolution.mutation={none: 0, architecture: 0, parameters: 0, hyperparameters: 1}"
    asked = ("evolution.strategy=cma_es:Search", RANGES, every, "checkpoint.keep=20", "training.max_steps=240")
    assert train(*asked, "run.name=a") == 0
    run = in_directory / "runs" / "a"
    before = lines(run / "lineage.jsonl")
    kinds = {(row["mutation"]["kind"], row["mutation"]["target"]) for row in before}
    assert {kind for kind, target in kinds if target != "archive"} == {"initial", "strategy"}
    assert len({row["hyperparameters"]["gamma"] for row in before}) > 8
    cut_back(run, 2)
    assert train(*asked, "run.name=a", "run.resume=auto") == 0
    assert lines(run / "lineage.jsonl") == before
    assert not [one for one in recwarn if issubclass(one.category, EvorlWarning)]
