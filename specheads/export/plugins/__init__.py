"""A head inside somebody else's engine: vLLM, and transformers' own generate."""
