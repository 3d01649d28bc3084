"""The commands of `evorl`: one module each, imported when the command is called."""

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {
    "train": "train a population of agents, and evolve it",
    "tune": "train several seeds of one configuration, with their summary",
    "config": "a whole configuration with what its keys mean, or one key",
    "evaluate": "the best agent's return on fresh episodes",
    "export": "an agent as an ONNX file, checked against what it predicts",
    "push": "the best agent as a model page of the Hugging Face Hub",
    "plot": "a picture of a run, or of several with their mean and its interval",
    "report": "one HTML page about a run, or a comparison of several",
    "schedule": "what the best agent was in each generation, and what changed",
    "list": "the runs of a directory: what they train, how far they are, how they ended",
    "lineage": "the ancestors of the best agent, and what made each of its parent",
    "watch": "look at an agent that plays, in a window or a film",
    "clean": "remove checkpoints, which only a resumed run needs",
    "completion": "what bash, zsh or fish needs to complete commands and options",
    "resume": "go on with a run, further than it went if so asked",
    "replay": "train one agent on the schedule of a run's best one, as seed=N says",
}
"""Help text of each command; `COMMAND` in the module of the same name defines its arguments and runs it."""
