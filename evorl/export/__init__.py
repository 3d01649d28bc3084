"""Export of agents: ONNX files, and model pages on the Hugging Face Hub."""
