"""ONNX Runtime sessions of exported agents, and the names of their recurrent state and action."""

from __future__ import annotations

from typing import Any

from evorl.types import UserError, message_of

STATE, NEXT_STATE, ACTION = "state", "next_state", "action"


def session_of(payload: bytes) -> Any:
    """Return a single-threaded onnxruntime session. Raises UserError if it cannot load the file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # Its own log would print a second message beside our one-line error.
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base class.
        raise UserError(f"onnxruntime cannot read the file: {message_of(error, 300)}") from error
