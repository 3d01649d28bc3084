"""Videos of an agent's episodes, encoded with PyAV. Axes: H rows, W columns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.continuation import Vector
from evorl.envs.environments import Resets
from evorl.envs.faults.closing import close_vector
from evorl.envs.faults.raising import call_or_user_error
from evorl.envs.tensor import TensorEnvironments, is_tensor
from evorl.envs.tensor.sources import device_of
from evorl.envs.vector import for_evaluation, make_vector, stacked_frames
from evorl.population import Policy
from evorl.runs.reading.loaded import LoadedAgent, load
from evorl.seeding import numpy_generator
from evorl.system.extras import require
from evorl.system.files import check_folder, make_subdirectory, replacing
from evorl.system.plugins import described
from evorl.types.outcomes import UserError

Image = NDArray[np.uint8]
FILM_STEPS = 5000
"""The maximum number of steps in a video of the elite, since other ranks wait for it. Pong may take 3,000 per game."""
ENLARGED = 4
"""The upscaling factor of frames shown as the agent observes them."""
TO_BE_SHOWN = "an environment that is watched takes the argument render_mode, and has a method render"


def check_video(path: Path) -> None:
    """Raise UserError unless a video can be written to this path."""
    require("video", "--video")
    if path.suffix != ".mp4":
        raise UserError(f"--video: {path} must end in .mp4")
    check_folder(path)


def play(
    agent: LoadedAgent, settings: Environment, seeds: Sequence[int], most: int | None, mode: str
) -> Generator[tuple[Image | None, float | None, float]]:
    """Play one full episode per seed, of at most `most` steps; yield (frame, return, frame rate) after each step.

    The return is None until the episode ends. The frame is None in render mode `human`, which opens a window. Raises
    UserError if the environment cannot be rendered.
    """
    if is_tensor(settings.id):
        if mode == "human":
            raise UserError(
                f"watch: {settings.id} is a simulator of tensors, which has no window; use --video FILE.mp4"
            )
        yield from _simulated(agent, settings, seeds, most)
        return
    if mode == "rgb_array":
        # SDL, which renders for Gymnasium, fails without a display.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    rendered, sees = _shown(settings, mode)
    # As in evaluation, a lost life does not end the game, but FIRE is pressed after it.
    frames = stacked_frames(rendered)
    try:
        vector = make_vector(rendered.model_copy(update={"life_loss_ends": False}) if frames else rendered, 1)
    except UserError as error:
        raise UserError(f"{error}; {TO_BE_SHOWN}" if "render_mode" in str(error) else str(error)) from error
    if isinstance(vector, SyncVectorEnv):
        # A reset within the step that ends an episode would replace its last frame.
        vector.autoreset_mode = AutoresetMode.NEXT_STEP
    try:
        resets = Resets(rendered, vector, 1, whole_games=True)
        rate = float((vector.metadata or {}).get("render_fps") or 30)
        for seed in seeds:
            seeded: Any = np.array([seed]) if frames else [seed]
            observation, info = call_or_user_error(f"a reset of {settings.id}", partial(vector.reset, seed=seeded))
            resets.restart(info)
            state, total, steps, ended = None, 0.0, 0, False
            yield sees(vector, observation), None, rate
            while not ended:
                mask = info.get("action_mask")
                action, state = agent.predict(observation, state, action_mask=mask)
                resets.serve(action)
                result = call_or_user_error(f"a step of {settings.id}", vector.step, action)
                observation, reward, terminated, truncated, info = result
                total, steps = total + float(reward[0]), steps + 1
                ends = resets.step(terminated, truncated, info, np.array([steps]))
                ended = bool(ends.game_over[0]) or steps == most
                yield sees(vector, observation), total if ended else None, rate
    finally:
        close_vector(vector, settings.id)


def _simulated(
    agent: LoadedAgent, settings: Environment, seeds: Sequence[int], most: int | None
) -> Generator[tuple[Image | None, float | None, float]]:
    """`play` for a simulator: one copy, one episode for each seed."""
    with TensorEnvironments(settings, 1, 1, device_of(settings)) as environments:
        # Never sampled from: the agent acts without exploration.
        policy = Policy([agent.agent], agent.algorithm, torch.Generator(environments.device))
        rate = float(environments.frames_per_second)
        for seed in seeds:
            environments.reset([seed])
            state, total, steps, ended = policy.initial_state(1), 0.0, 0, False
            yield _picture(settings.id, environments.picture), None, rate
            while not ended:
                output, state = policy.act(environments.observation, environments.started, state, deterministic=True)
                step = environments.step(output.action)
                total, steps = total + float(step.reward), steps + 1
                ended = bool(step.terminated | step.truncated) or steps == most
                # A reset within the step has replaced the last picture.
                yield None if ended else _picture(settings.id, environments.picture), total if ended else None, rate
            environments.check()


def write_video(path: Path, images: Iterator[tuple[Image, float]]) -> int:
    """Encode images [H, W, 3], each with its frame rate, as MP4; return their number. Raises UserError for none."""
    import av

    first = next(images, None)
    if first is None:
        raise UserError("--video: no frame was rendered")
    rows, columns = (length // 2 * 2 for length in first[0].shape[:2])
    count = 0
    with replacing(path) as file, av.open(file, "w", format="mp4") as film:
        stream: Any = film.add_stream("h264", rate=round(first[1]))
        stream.width, stream.height, stream.pix_fmt = columns, rows, "yuv420p"
        for image, _ in chain((first,), images):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(image[:rows, :columns]), format="rgb24")
            film.mux(stream.encode(picture))
            count += 1
        film.mux(stream.encode())
    return count


def film_elite(run: Path, generation: int) -> Path:
    """Record one episode of a run's elite after a generation; return the video's path. Raises UserError, OSError."""
    agent, path = load(run, allow_code=True), run / "videos" / f"generation-{generation:06d}.mp4"
    make_subdirectory(path.parent)
    seed = int(numpy_generator(agent.config.seed, generation=generation, rank=0, purpose="film").integers(2**31))
    most = min(agent.config.evaluation.max_steps or FILM_STEPS, FILM_STEPS)
    with contextlib.closing(play(agent, agent.config.evaluation_environment, [seed], most, "rgb_array")) as seen:
        write_video(path, ((image, rate) for image, _, rate in seen if image is not None))
    return path


Sees = Callable[[Any, Any], Image | None]


def _shown(settings: Environment, mode: str) -> tuple[Environment, Sees]:
    """The environment settings for this render mode, and the function that gets a frame."""
    settings = for_evaluation(settings)
    if stacked_frames(settings):
        return settings, _as_the_agent_sees
    single = settings.model_copy(update={"vectorization": "sync"})
    kwargs = {**single.kwargs, "render_mode": mode}
    return single.model_copy(update={"kwargs": kwargs}), partial(_rendered, settings.id)


def _rendered(id: str, vector: Vector, observation: Any) -> Image | None:
    """The frame that the environment renders, if any. Raises UserError if it raises or gives no picture."""
    try:
        images = vector.render()
    except Exception as error:
        hint = f"; {TO_BE_SHOWN}" if isinstance(error, AttributeError | NotImplementedError) else ""
        raise UserError(f"environment.id: {id} raised {described(error)}{hint}") from error
    return None if images is None else _picture(id, images[0])


def _picture(id: str, picture: Any) -> Image | None:
    """A picture as bytes, if there is one. Raises UserError for anything else."""
    if picture is None:
        return None
    image = np.asarray(picture)
    has_shape = image.ndim == 3 and image.shape[2] == 3 and min(image.shape) >= 2
    # Floats from 0 to 1 would be filmed black, and larger integers would wrap around.
    if has_shape and image.dtype.kind in "iu" and image.min() >= 0 and image.max() <= 255:
        return np.asarray(image, dtype=np.uint8)
    raise UserError(
        f"environment.id: render() of {id} gave {list(image.shape)} of {image.dtype}; a picture is an array "
        "[rows, columns, 3] of bytes, 0 to 255, with at least 2 rows and columns"
    )


def _as_the_agent_sees(vector: Any, observation: Any) -> Image:
    """The newest frame of an Atari observation, upscaled."""
    frame = np.asarray(observation)[0, -1]
    grey = frame if frame.ndim == 2 else frame.mean(-1).astype(np.uint8)
    return np.repeat(np.repeat(grey, ENLARGED, 0), ENLARGED, 1)[..., None].repeat(3, -1)
