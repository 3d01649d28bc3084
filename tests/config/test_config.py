"""The configuration: what is right loads, what is wrong is named with what would be right."""

from pathlib import Path

import pytest
import yaml
from helpers.support import ROOT, config, needs_its_extra

from evorl.config import override, read_yaml, validate
from evorl.config.algorithms import SETTINGS
from evorl.config.yaml import configuration_file
from evorl.evolution.selection import selects
from evorl.runs.configuration import read_config
from evorl.runs.launch import check, load_config
from evorl.types.outcomes import EvorlWarning, UserError

DQN = ROOT / "configs" / "training" / "dqn.yaml"
TRAINING = sorted((ROOT / "configs" / "training").glob("*.yaml"))


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path):
    needs_its_extra(path.stem)
    load_config([], path)


def test_optimisers_are_those_of_the_sources():
    """PPO's of CleanRL and PureJaxRL, SAC's of Tianshou, TD3's of its authors."""
    found = {name: validate({"algorithm": {"name": name}}).algorithm for name in ("ppo", "sac", "td3")}
    expected = {"ppo": (1e-5, 0.5), "sac": (1e-8, None), "td3": (1e-8, None)}
    assert {name: (each.adam_epsilon, each.max_grad_norm) for name, each in found.items()} == expected


def test_a_single_range_changes_that_of_the_file():
    ppo = next(path for path in TRAINING if path.name == "ppo.yaml")
    ranges = load_config(["evolution.hyperparameters.clip={min: 0.1, max: 0.3}"], ppo).evolution.hyperparameters
    assert len(ranges) == 4
    assert (ranges["clip"].min, ranges["clip"].max) == (0.1, 0.3)
    ranges = load_config(["evolution.hyperparameters={clip: {min: 0.1, max: 0.3}}"], ppo).evolution.hyperparameters
    assert list(ranges) == ["clip"]
    with pytest.raises(UserError, match=r"^evolution.hyperparameters.tau.min: this key is required"):
        load_config(["evolution.hyperparameters.tau.max=1e-2"], DQN)


def test_null_keeps_a_hyperparameter_as_it_is_and_leaves_the_others_ranges():
    ppo = next(path for path in TRAINING if path.name == "ppo.yaml")
    null = "evolution.hyperparameters.learning_rate=null"
    others = load_config([], ppo).evolution.hyperparameters
    assert load_config([null], ppo).evolution.hyperparameters == {
        name: ends for name, ends in others.items() if name != "learning_rate"
    }
    assert "learning_rate" in others
    ranges = config("algorithm=dqn").evolution.hyperparameters
    assert config("algorithm=dqn", null).evolution.hyperparameters == {
        name: ends for name, ends in ranges.items() if name != "learning_rate"
    }
    with pytest.raises(UserError, match=r"hyperparameters.lerning_rate: .* did you mean 'learning_rate'"):
        config("evolution.hyperparameters.lerning_rate=null")
    with pytest.raises(UserError, match=r"^algorithm.gamma: 2"):
        config(null, "algorithm.gamma=2")


def test_false_turns_evolution_off_and_keeps_the_rest_of_the_section(tmp_path):
    assert not selects(config("evolution.steps=77", "evolution=false").evolution, 4)
    assert config("evolution.steps=77", "evolution=false").evolution.steps == 77
    path = tmp_path / "own.yaml"
    path.write_text("evolution: false")
    assert not selects(load_config([], path).evolution, 4)


SEVERAL = """
algorithm: {name: dqn, gama: 0.9, learning_rate: -1}
network: {hiden_sizes: [8]}
population: {size: many}
evolution: {selection: {size: 0}}
"""


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("learning_rate=1e-3", "learning_rate: unknown key; did you mean 'algorithm.learning_rate'?"),
        ("max_steps=9", "max_steps: unknown key; did you mean 'evaluation.max_steps' or 'training.max_steps'?"),
        ("populaton.size=3", "populaton: unknown key; did you mean 'population'?"),
        ("lr=1e-3", "lr: unknown key; did you mean 'algorithm.learning_rate'?"),
        ("algorithm.lr=1e-3", "algorithm.lr: unknown key; did you mean 'algorithm.learning_rate'?"),
        ("total_timesteps=9", "total_timesteps: unknown key; did you mean 'training.max_steps'?"),
        ("algorithm.buffer_size=9", "algorithm.buffer_size: unknown key; did you mean 'replay.capacity'?"),
        ("environment.name=a", "environment.name: unknown key; did you mean 'environment.id'?"),
        ("algoritm.learning_rat=1e-3", "algoritm: unknown key; did you mean 'algorithm'?"),
        ("checkpoint.zzz=1", "checkpoint.zzz: unknown key; known here: "),
        ("population=8", "population: 8 does not fit: this is a section, with keys of its own: size, islands, "),
        (
            "evolution.hyperparameters=[1]",
            "evolution.hyperparameters: [1] does not fit: it must be a mapping, such as {",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(word, message):
    with pytest.raises(UserError) as caught:
        load_config([word], DQN)
    assert str(caught.value).startswith(message)


def test_all_that_is_wrong_is_told(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text(SEVERAL)
    with pytest.raises(UserError, match=r"^5 settings are wrong: ") as caught:
        load_config([], path)
    message = str(caught.value)
    assert "(1) algorithm.gama: unknown key; did you mean 'algorithm.gamma'?" in message
    assert "(2) network.hiden_sizes: unknown key; did you mean 'network.hidden_sizes'?" in message
    for part in (
        "algorithm.learning_rate: -1 is out",
        "population.size: 'many' does not",
        "evolution.selection.size: 0",
    ):
        assert part in message


def test_the_names_of_sections_stand_for_what_they_are_about(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("environment: CartPole-v1\nalgorithm: ppo\n")
    settings = load_config([], path)
    assert (settings.environment.id, settings.algorithm.name) == ("CartPole-v1", "ppo")
    settings = load_config(["environment=Acrobot-v1", "environment.num_envs=3"], path)
    assert (settings.environment.id, settings.environment.num_envs) == ("Acrobot-v1", 3)
    path.write_text("environment: CartPole-v1\nevaluation: {environment: CartPole-v0}\n")
    evaluated = load_config(["evaluation.environment.kwargs.render_mode=rgb_array"], path).evaluation.environment
    assert (evaluated.id, evaluated.kwargs) == ("CartPole-v0", {"render_mode": "rgb_array"})


def test_settings_are_taken_as_sweeps_pass_them():
    settings = load_config(["--algorithm.learning_rate=0.001", "--network.hidden_sizes=[8, 8]", "--seed=3"], DQN)
    assert (settings.algorithm.learning_rate, settings.network.hidden_sizes, settings.seed) == (1e-3, (8, 8), 3)


def test_another_algorithm_takes_its_own_shipped_file_and_nothing_of_the_other_s_settings(tmp_path):
    for assignment in ("algorithm.name=ppo", "algorithm=ppo"):
        assert configuration_file("dqn", [assignment]) == DQN.with_name("ppo.yaml")
    path = tmp_path / "some.yaml"
    path.write_text("environment: CartPole-v1\nalgorithm: {name: dqn, dueling: true}\n")
    assert load_config(["algorithm.name=dqn"], path).algorithm.dueling
    assert load_config(["algorithm=ppo"], path).environment.id == "CartPole-v1"


def test_a_population_of_one_needs_no_further_setting():
    settings = load_config(["population.size=1"], DQN)
    assert settings.evolution == load_config([], DQN).evolution, "which its agent does not follow"
    with pytest.raises(UserError, match=r"evolution.selection.size: a tournament of 9"):
        load_config(["population.size=2", "evolution.selection.size=9"], DQN)


def test_the_resolved_configuration_reproduces_itself(tmp_path):
    first = load_config(["network.hidden_sizes=[8, 16]", "training.target_fitness=null"], DQN)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(first.to_yaml())
    assert load_config([], resolved) == first


def test_overrides_are_read_as_yaml():
    settings = config(
        "training.target_fitness=null", "network.hidden_sizes=[32,32]", "algorithm.learning_rate=1e-4",
        "environment.kwargs={a: [1, 2]}", "run.name=x", "evolution.hyperparameters.gamma={min: 0.9, max: 0.99}",
    )  # fmt: skip
    assert settings.training.target_fitness is None
    assert settings.network.hidden_sizes == (32, 32)
    assert settings.algorithm.learning_rate == 1e-4
    assert settings.environment.kwargs == {"a": [1, 2]}
    assert settings.evolution.hyperparameters["gamma"].max == 0.99


def test_paths_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config("run.directory=~/runs").run.directory == tmp_path / "runs"
    assert config("run.directory='~'", "run.name='~'").run.directory == tmp_path
    assert config("run.name='~'").run.name == "~", "a name is no path of its own"
    assert config("population.from=~/a").population.from_ == tmp_path / "a"
    assert config("population.from=b~/c").population.from_ == Path("b~/c")
    benchmarks = {"~/a": f"{tmp_path}/a"} | {name: name for name in ("random", "my.game:player", "./a")}
    assert [config(f"league.benchmark={each}").league.benchmark for each in benchmarks] == [*benchmarks.values()]
    assert str(config("population.from=hf:ME/a").population.from_) == "hf:ME/a"
    with pytest.raises(UserError, match=r"run\.directory: '~nobody-here/a': there is no home directory of this name"):
        config("run.directory=~nobody-here/a")


NUMBERS = {
    '"1e-3"': "1e-3",
    "010": 10, "0": 0, "1_000": 1000, "0x10": 16, "1:30": "1:30", "1:30.5": "1:30.5", "1.5": 1.5, "'010'": "010",
    "2026-11-28": "2026-11-28",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_are_read_as_people_write_them(text, value, tmp_path):
    """YAML 1.1 reads 010 as 8, and 1:30 as 90."""
    (tmp_path / "a.yaml").write_text(f"environment: {{kwargs: {{x: {text}}}}}")
    for data in (read_yaml(tmp_path / "a.yaml"), override({}, [f"environment.kwargs.x={text}"])):
        assert data["environment"]["kwargs"] == {"x": value}
    saved = config(f"environment.kwargs.x={text}")
    (tmp_path / "b.yaml").write_text(saved.to_yaml())
    assert validate(read_yaml(tmp_path / "b.yaml")) == saved


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("algorithm.gama=0.9", "algorithm.gama: unknown key; did you mean 'algorithm.gamma'?"),
        ("algorithm.distribution=quantiles", "algorithm.distribution: 'quantiles' does not fit: 'none', 'categorical'"),
        ("algorithm.gamma=1.5", "algorithm.gamma: 1.5 is out of range; it must be at least 0 and at most 1"),
        ("network.hidden_sizes=[]", "network.hidden_sizes: [] does not fit: it must have at least 1 entry"),
        ("network.hidden_sizes=[32, 0]", "network.hidden_sizes.1: 0 is out of range; it must be at least 1"),
        (
            "evolution.mutation={none: 0, architecture: 0, parameters: 0, hyperparameters: 0}",
            "evolution.mutation: the weights sum to 0",
        ),
        ("evolution.selection.size=9", "evolution.selection.size: a tournament of 9 needs at least as many agents"),
        ("evolution.hyperparameters={learning_rat: {min: 1, max: 2}}", "did you mean 'learning_rate'?"),
        (
            "evolution.hyperparameters.learning_rat.min=1",
            "evolution.hyperparameters.learning_rat: dqn has no hyperparameter of this name; did you mean 'learning_",
        ),
        ("evolution.hyperparameters={max_grad_norm: {min: 1, max: 2}}", "algorithm.max_grad_norm: is null"),
        (
            "evolution.hyperparameters={gamma: {min: 0.5, max: 1}}",
            "evolution.hyperparameters.gamma: max 1 must be below 1 on the scale one_minus_log; use 0.999",
        ),
        (
            "network={name: module, factory: 'helpers.support:buggy_network'}",
            r"network.factory: .* raised KeyError: 'units' \(.*support.py:\d+ in buggy_network: return torch.nn.Linear",
        ),
        (
            "environment={id: LunarLander-v3, kwargs: {gravity: 5}}",
            "environment.kwargs: 'LunarLander-v3' cannot be made with these arguments",
        ),
        (
            "network={name: module, factory: 'helpers.support:probe_network', recurrent: lstm}",
            "network: a module has no recurrent state; leave `recurrent: lstm` out",
        ),
        (
            "network={name: module, factory: 'helpers.support:probe_network', initialisation: uniform}",
            "network: a module initialises itself, .*; where the file has it, use network.initialisation=null$",
        ),
        ("tracking.backends=wandb,trackio", "tracking.backends: .* it must be a list, such as [wandb, trackio]"),
        ("network={name: module, factory: 'no.where:f'}", "network.factory: cannot import"),
        (
            "replay.learning_starts=100000",
            "replay.learning_starts: 100000 transitions never fit into replay.capacity 500; use at most 500$",
        ),
        ("algorithm.name=dqm", "algorithm.name: there is no algorithm 'dqm'; did you mean 'dqn'?"),
        ("seed=1:30", "seed: '1:30' does not fit: it must be a whole number$"),
        ("environment.id=LunarLandr-v3", "environment.id: cannot make 'LunarLandr-v3'"),
        ("environment.id=Pendulum-v1", "algorithm.name: dqn cannot act in Box.* of Pendulum-v1; it takes Discrete"),
        ("run.name=sweep #2", "run.name: 'sweep #2' has a comment, which begins at the #; quote a text that has one$"),
        ("training.max_steps=many", "training.max_steps: 'many' does not fit: it must be a whole number$"),
        ("algorithm.double=2", "algorithm.double: 2 does not fit: it must be true or false$"),
        ("run.name=[1", "run.name: .* is not valid YAML"),
        ("seed", "'seed': an override has the form key.path=value"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(assignment, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[").replace("?", r"\?")) as caught:
        check(config(assignment))
    assert "\n" not in str(caught.value)


GAME, RATED = "environment.id=helpers.games:ThreeMoves", "evolution.fitness=rating"
DISAGREE = [
    ((GAME, "algorithm={name: impala, rollout_steps: 4}"), "algorithm.name: impala learns from actor processes, and "),
    ((GAME, "evaluation.fitness=training"), "evaluation.fitness: in a game agents train against different opponents"),
    ((GAME, RATED, "league.archive=1"), "league.archive: 1 is too small to keep the agent that defines rating 0, so "),
    ((GAME, RATED, "training.target_fitness=300"), "training.target_fitness: with evolution.fitness=rating the target"),
    ((GAME, "tracking.video=true"), "tracking.video: helpers.games:ThreeMoves is a game, and games are not recorded"),
    ((GAME, "population.islands=2"), "population.islands: helpers.games:ThreeMoves is a game"),
    ((GAME, "league.matchmaking=pfps"), "league.matchmaking: there is no 'pfps'; did you mean 'pfsp'?"),
    ((GAME, "evolution.fitness={rating: 2}"), "rating stands alone"),
    ((GAME, "league.games=3"), "league.games"),
    (("league.games=4",), "league: CartPole-v1 is not a two-player game; leave it out"),
    ((RATED,), "evolution.fitness: CartPole-v1 is not a two-player game, so nobody has a rating"),
    (("population={size: 1, islands: 2}",), "population: size: 1 leaves nothing to select in an island"),
    (("population={size: 1, control: true}",), "population: size: 1 leaves nothing to select in an island"),
    (("population.control=true", "evolution=false"), "population.control: evolution.selection.name is none"),
    (
        ("population={size: 40, islands: 20, control: true}",),
        "population: islands: 20 of 40 agents, with as many twins, are more than 1,000 agents",
    ),
    (("evolution.fitness=success",), "evolution.fitness: 'success' is neither 'return' nor 'info.KEY'"),
    (("evolution.fitness={}",), "evolution.fitness: no term is left"),
    (("evolution.fitness={return: 0}",), "evolution.fitness: return has the weight 0"),
    (
        ("evaluation.fitness=training", "evolution.fitness={return: 1, info.success: 1}"),
        "evaluation.fitness: training counts only returns, and",
    ),
    (
        (
            "tracking.exclude=[algorithm.learning_rate]",
            "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1}}",
        ),
        "tracking.exclude: algorithm.learning_rate cannot be left out, because",
    ),
    (
        ("environment.observation_indices=[0, 9]",),
        "environment.observation_indices: index 9 is out of range; CartPole-",
    ),
    (
        (
            "environment={id: 'helpers.spaces:Shown-v0', kwargs: {kind: image}}",
            "network.convolutions=[{channels: 4, kernel: 13}]",
        ),
        "network.convolutions.0.kernel: 13 is more than the 12x12 ",
    ),
    (("tracking.exclude=[network.hidden_sizes]",), "tracking.exclude: network.hidden_sizes cannot be left out, beca"),
    (("tracking.exclude=[environment]",), "tracking.exclude: environment cannot be left out, because runs are named"),
]


@pytest.mark.parametrize(("settings", "message"), DISAGREE)
def test_settings_that_disagree_are_named_in_one_line(settings, message, monkeypatch):
    """What is not installed is not asked."""
    monkeypatch.setattr("evorl.runs.launch.require", lambda extra, what: None)
    with pytest.raises(UserError) as caught:
        check(config(*settings))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the configuration: No such file"),
        ("seed: [1", "not valid YAML"),
        ("- 1\n- 2", "must be a mapping"),
        ("seed: 1\nseed: 2", "key 'seed' is given twice"),
        (b"\xff\xfe\x00", "cannot read the configuration: it is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, message):
    path = tmp_path / "some.yaml"
    if isinstance(text, bytes):
        path.write_bytes(text)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "backends"),
    [("none", ()), ("null", ()), ("false", ()), ("[]", ()), ("tensorboard", ("tensorboard",))],
)
def test_one_tracker_or_none_needs_no_list(given, backends):
    assert config(f"tracking.backends={given}").tracking.backends == backends


@pytest.mark.parametrize("setting", ["prioritised={}", "n_step=3", "capacity=5000", "shared=false"])
def test_a_replay_is_refused_where_there_is_none(setting):
    key = setting.partition("=")[0]
    for name in SETTINGS:
        settings = f"algorithm={{name: {name}}}", "replay={}", f"replay.{setting}"
        if SETTINGS[name].replayed:
            assert config(*settings).replay != config("replay={}").replay
        else:
            with pytest.raises(UserError, match=rf"replay\.{key}: {name} learns from rollouts; leave it out"):
                config(*settings)
            with pytest.raises(UserError, match=rf"replay\.capacity: {name} learns from rollouts; leave it out"):
                config(settings[0], "replay.capacity=100")


def test_a_population_must_divide_over_sharded_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"4 agents cannot be divided over 3 processes .* use a multiple of 3"):
        check(config("population.placement=sharded"))


SMALL_PPO = "algorithm={name: ppo, rollout_steps: 64, batch_size: 2, epochs: 1, sequence_length: 64}"


@pytest.mark.parametrize(
    ("settings", "is_outside"),
    [("learning_rate: {min: 1e-5, max: 1e-4}", True), ("learning_rate: {min: 1e-5, max: 1e-2}", False)],
)
def test_a_first_value_outside_its_own_range_is_said(settings, is_outside, recwarn):
    ranges = f"evolution.hyperparameters={{{settings}}}"
    check(config(SMALL_PPO, "environment={id: CartPole-v1, num_envs: 2}", ranges))
    said = [str(each.message) for each in recwarn if "evolution.hyperparameters" in str(each.message)]
    wanted = (
        "evolution.hyperparameters.learning_rate: agents begin with 0.0003, outside 1e-05 to 0.0001, until a mutation "
        "moves it inside"
    )
    assert said == [wanted] * is_outside


@pytest.mark.parametrize("name", SETTINGS)
def test_evolution_turns_something_of_every_algorithm_by_default(name):
    settings = validate({"algorithm": {"name": name}})
    ranges = settings.evolution.hyperparameters
    assert "learning_rate" in ranges
    for key, span in ranges.items():
        value = settings.algorithm.first_hyperparameters()[key]
        assert span.scale == ("one_minus_log" if key in settings.algorithm.near_one else "log")
        assert span.min <= value <= span.max or (key, value) == ("gae_lambda", 1.0)
        assert span.max / span.min >= 2 or key == "gae_lambda", "there is room to move"
    assert validate(yaml.safe_load(settings.to_yaml())) == settings


def test_default_ranges_hold_what_is_configured_and_leave_out_what_is_off():
    ranges = config("algorithm={name: ppo, learning_rate: 1e-5, batch_size: 1024}").evolution.hyperparameters
    assert (ranges["learning_rate"].min, ranges["learning_rate"].max) == (1e-5, 3e-3)
    assert ranges["batch_size"].max == 1024
    assert "entropy_coefficient" in ranges
    off = config("algorithm={name: ppo, entropy_coefficient: 0}").evolution.hyperparameters
    assert "entropy_coefficient" not in off
    given = config("algorithm={name: ppo}", "evolution.hyperparameters={clip: {min: 0.1, max: 0.2}}")
    assert set(given.evolution.hyperparameters) == {"clip"}


@pytest.mark.parametrize(
    ("algorithm", "name", "why"),
    [
        ("{name: dqn, target: periodic, target_period: 10}", "tau", "because `target: periodic` copies the whole"),
        ("{name: sac, target_entropy: -2}", "target_entropy_share", "because `target_entropy` is set"),
    ],
)
def test_a_range_without_effect_is_refused(algorithm, name, why):
    ranges = f"evolution.hyperparameters={{{name}: {{min: 0.01, max: 0.02}}}}"
    with pytest.raises(UserError, match=rf"evolution.hyperparameters.{name}: has no effect, {why}.*drop its range"):
        config(f"algorithm={algorithm}", ranges)
    config(f"algorithm={{name: {algorithm[7:10]}}}", ranges)


def test_a_run_says_that_sampling_changes_nothing_of_agents_of_another_run():
    with pytest.warns(
        EvorlWarning, match=r"evolution.initial: sampled has no effect together with population.from, whose"
    ):
        load_config(["evolution.initial=sampled", "population.from=runs/x"], DQN)


def test_a_run_says_that_its_mutations_of_hyperparameters_change_nothing():
    with pytest.warns(EvorlWarning, match=r"no ranges, so that 12% of all mutations change nothing; .* ranges of dqn"):
        load_config(["evolution.hyperparameters={}", "evolution.mutation.hyperparameters=0.11"], DQN)
    load_config(["evolution.hyperparameters={}", "evolution.mutation.hyperparameters=0"], DQN)


@pytest.mark.parametrize(
    ("algorithm", "key", "why"),
    [
        ("dqn, categorical: {v_max: 500}", "categorical", "`distribution` is none"),
        ("dqn, distribution: quantile, loss: mse", "loss", "`distribution` is quantile"),
        ("dqn, target: periodic, target_period: 9, tau: 0.5", "tau", "`target: periodic` copies the whole network"),
        ("dqn, exploration: {schedule: linear, steps: 9, decay: 0.9}", "exploration.decay", "`schedule` is linear"),
        ("td3, exploration: {noise: none, scale: 0.4}", "exploration.scale", "`noise` is none"),
        ("ddpg, exploration: {noise: gaussian, reversion: 0.4}", "exploration.reversion", "`noise` is gaussian"),
    ],
)
def test_a_run_says_that_a_setting_changes_nothing(algorithm, key, why):
    changes = [*config(f"algorithm={{name: {algorithm}}}").algorithm.ineffective_changes("algorithm")]
    assert changes == [(f"algorithm.{key}", f"because {why}")]
    if key == "tau":
        with pytest.warns(EvorlWarning, match=f"^algorithm.{key}: changes nothing, because {why}"):
            load_config([f"algorithm={{name: {algorithm}}}"], DQN)


@pytest.mark.parametrize(
    ("network", "key", "why"),
    [
        (".recurrent_size=32", "recurrent_size", "without `recurrent`"),
        ("={name: module, factory: 'helpers.support:probe_network', activation: tanh}", "activation", "because a `mod"),
    ],
)
def test_a_run_says_that_a_setting_of_networks_changes_nothing(network, key, why):
    with pytest.warns(EvorlWarning, match=f"^network.{key}: changes nothing, {why}"):
        load_config([f"network{network}"], DQN)


def test_a_run_says_nothing_of_what_an_override_takes_from_a_shipped_file(recwarn):
    load_config(["algorithm.distribution=none"], DQN.with_name("rainbow.yaml"))
    assert not [warning for warning in recwarn if "changes nothing" in str(warning.message)]


def test_a_resumed_run_says_nothing_of_what_an_override_took_from_its_shipped_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(read_config(DQN.with_name("rainbow.yaml"), ["algorithm.distribution=none"]).to_yaml())
    (tmp_path / "checkpoints").mkdir()
    load_config(["--config", str(file)], DQN)
    with pytest.warns(EvorlWarning, match=r"^algorithm.categorical: changes nothing, because `distribution` is none"):
        load_config(["--config", str(file), "algorithm.categorical.v_max=9"], DQN)


def test_every_setting_of_the_shipped_configurations_has_an_effect():
    for path in TRAINING:
        config = validate(read_yaml(path))
        assert not [*config.algorithm.ineffective_changes("algorithm")], path.name
        assert not [*config.network.ineffective_changes("network")], path.name


def test_the_weight_of_an_added_mutation_is_no_boolean():
    with pytest.raises(UserError, match=r"evolution.mutation.noise: True does not fit: it must be a number"):
        load_config(["evolution.mutation.noise=true"], DQN)
