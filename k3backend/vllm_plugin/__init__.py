"""The one place that knows vLLM: its classes in, its classes out."""
