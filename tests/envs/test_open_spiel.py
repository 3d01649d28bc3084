"""OpenSpiel's games: play as OpenSpiel's own states have it, seeded chance, views of both seats, and refusals."""

from collections import Counter

import numpy as np
import pytest
from helpers.support import config, lines, train

from evorl.config import Environment
from evorl.envs import Environments
from evorl.envs.games import is_game, make_game
from evorl.runs.launch import check
from evorl.runs.storage.trust import custom_code, refuse_code
from evorl.types.outcomes import UserError

spiel = pytest.importorskip("pyspiel")
HIDDEN = ("kuhn_poker", "leduc_poker", "phantom_ttt")


def game(name, **kwargs):
    return make_game(Environment(id=f"openspiel:{name}", kwargs=kwargs))


def replayed(played):
    """A state of OpenSpiel's own after the same moves, chance's included."""
    state = played.game.new_initial_state()
    for action in played._state.history():
        assert action in state.legal_actions()
        state.apply_action(action)
    return state


@pytest.mark.parametrize("name", [*HIDDEN, "connect_four", "backgammon", "hanabi"])
def test_random_play_is_openspiels(name):
    played, rng = game(name), np.random.default_rng(0)
    for seed in range(4):
        played.reset(seed)
        gained, moves = [0.0, 0.0], 0
        while played.acting and moves < 100:
            (seat,) = played.acting
            state, turn = replayed(played), played.seen[seat]
            assert seat == state.current_player()
            assert np.flatnonzero(turn.mask).tolist() == state.legal_actions()
            tensor = state.information_state_tensor(seat) if name in HIDDEN else state.observation_tensor(seat)
            assert turn.observation.reshape(-1)[: len(tensor)].tolist() == np.float32(tensor).tolist()
            assert (turn.observation.reshape(-1)[len(tensor) :] == seat).all()
            assert not turn.over
            gained[seat] += turn.reward
            assert gained[seat] == pytest.approx(state.returns()[seat]), "until its own turn"
            played.step({seat: int(rng.choice(state.legal_actions()))})
            moves += 1
        state = replayed(played)
        assert played.totals == state.returns()
        if state.is_terminal():
            assert set(played.seen) == {0, 1}
            for seat, turn in played.seen.items():
                assert gained[seat] + turn.reward == pytest.approx(state.returns()[seat])
                assert turn.terminated
                assert not turn.mask.any()
                tensor = state.information_state_tensor(seat) if name in HIDDEN else state.observation_tensor(seat)
                assert turn.observation.reshape(-1)[: len(tensor)].tolist() == np.float32(tensor).tolist()


def test_chance_is_drawn_by_its_probabilities_from_the_seed():
    played = game("kuhn_poker")

    def deal(seed):
        played.reset(seed)
        return tuple(played._state.history())

    dealt = Counter(deal(seed) for seed in range(1200))
    assert {*dealt} == {(one, two) for one in range(3) for two in range(3) if one != two}
    assert all(150 < count < 250 for count in dealt.values())
    assert [deal(seed) for seed in range(20)] == [deal(seed) for seed in range(20)]
    played.reset(0)
    drawn = Counter(played._drawn([(5, 0.25), (3, 0.0), (8, 0.75)]) for _ in range(1000))
    assert {*drawn} == {5, 8}
    assert 200 < drawn[5] < 300
    first, second = game("backgammon"), game("backgammon")
    rolls = []
    for each in (first, second):
        each.reset(7)
        for _ in range(30):
            (seat,) = each.acting
            each.step({seat: int(np.flatnonzero(each.seen[seat].mask)[0])})
        rolls.append(each._state.history())
    assert rolls[0] == rolls[1], "chance later in a game is of its seed, too"


@pytest.mark.parametrize(
    ("name", "part", "mask"),
    [
        ("connect_four", (4, 6, 7), 7),
        ("leduc_poker", (31,), 3),
    ],
)
def test_what_networks_get_of_a_game(name, part, mask):
    with Environments(Environment(id=f"openspiel:{name}"), 1, 2) as environments:
        spec = environments.interface.parts["observation"]
        assert spec.shape == part
        assert spec.kind == ("image" if len(part) == 3 else "vector")
        assert not spec.channels_last
        assert environments.interface.mask_size == mask
        environments.try_step()


def test_parameters_are_openspiels():
    assert game("leduc_poker", suit_isomorphism=True).spaces()[0].shape == (25,)
    assert game("go", board_size=5, komi=2).spaces()[1].n == 26, "a whole number where a fraction could stand"


@pytest.mark.parametrize(
    ("name", "kwargs", "told"),
    [
        ("kuhn_pokr", {}, "environment.id: OpenSpiel has no game 'kuhn_pokr'; did you mean 'kuhn_poker'?"),
        ("kuhn_poker", {"players": 3}, "environment.id: openspiel:kuhn_poker has 3 players; evorl plays games of two"),
        ("goofspiel", {}, "environment.id: openspiel:goofspiel is played by simultaneous moves; evorl plays"),
        ("coordinated_mp", {}, "environment.id: openspiel:coordinated_mp gives neither an information state nor an"),
        ("bridge_uncontested_bidding", {}, "draws its chance events itself"),
        (
            "kuhn_poker",
            {"playrs": 2},
            "cannot be made: SpielError: Unknown parameter 'playrs'. Available",
        ),
        ("kuhn_poker", {"players": "two"}, "Wrong type for parameter players. Expected type: kInt"),
        ("kuhn_poker", {"players": 20}, "environment.kwargs: openspiel:kuhn_poker cannot be made: SpielError: "),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(name, kwargs, told):
    with pytest.raises(UserError) as raised, Environments(Environment(id=f"openspiel:{name}", kwargs=kwargs), 1, 1):
        pass
    assert told in str(raised.value)
    assert str(raised.value).startswith("environment.")
    assert "\n" not in str(raised.value)


def test_ids_of_games_name_no_code_of_their_own():
    assert is_game("openspiel:kuhn_poker")
    plain = config("environment.id=openspiel:kuhn_poker")
    refuse_code(plain, False)
    assert custom_code(plain) == {}
    for suite in ("openspiel", "pettingzoo"):  # A module of such a name would be imported.
        with pytest.raises(UserError, match=rf"environment\.id: '{suite}:x:Foo-v0' names custom code to execute"):
            refuse_code(config(f"environment.id={suite}:x:Foo-v0"), False)
    own = config("environment.id=openspiel:kuhn_poker", "network={name: module, factory: openspiel:make}")
    with pytest.raises(UserError, match=r"network\.factory: 'openspiel:make' names custom code to execute"):
        refuse_code(own, False)


def test_a_league_learns_kuhn_poker(in_directory):
    settings = (
        "environment={id: openspiel:kuhn_poker, num_envs: 8}", "population.size=2", "evolution={steps: 512, "
        "fitness: rating}", "training.max_steps=1536", "league={games: 8, margin: 0, archive: 4}",
        "algorithm={name: ppo, rollout_steps: 16, batch_size: 32, learning_rate: 1e-2}",
    )  # fmt: skip
    check(config(*settings))
    assert train("run.name=kuhn", *settings) == 0
    rows = lines(in_directory / "runs" / "kuhn" / "metrics.jsonl")
    assert len(rows) == 3
    assert all(np.isfinite(row["fitness"]).all() for row in rows)


@pytest.mark.parametrize("name", ["gin_rummy", "dark_chess"])
def test_the_text_of_a_game_without_an_information_state_hides_what_the_seat_does_not_see(name):
    played, rng = game(name), np.random.default_rng(0)
    played.reset(0)
    for _ in range(6):
        (seat,) = played.acting
        played.step({seat: int(rng.choice(np.flatnonzero(played.seen[seat].mask)))})
    texts = [played.text(seat) for seat in (0, 1)]
    assert all(texts)
    assert texts[0] != texts[1], "both would see the whole state"
