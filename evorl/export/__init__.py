"""Agents as files for other programs: ONNX, and model pages."""
