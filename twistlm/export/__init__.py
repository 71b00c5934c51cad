"""Other programs' formats: GGUF and ONNX."""
