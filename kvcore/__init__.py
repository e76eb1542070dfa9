"""kvcore: a KV cache for LLM serving whose correctness can be shown."""
